"""Blocks of output in the docs are compared with what the code before them has printed."""

import textwrap
from unittest import SkipTest

import pytest
from sybil.document import Document
from sybil.example import SybilFailure

from tests.doc_blocks import PARSERS

TWO_LINES = "print('  7.39 a')\nprint(' 10.76 b')"
SKIPPED = "<!--- skip: next if(True, reason='not here') -->"


def page(*blocks):
    """Return a page of blocks, each of which is a kind and its text, or a line."""
    texts = (own if isinstance(own, str) else f"```{own[0]}\n{own[1]}\n```" for own in blocks)
    return "\n\n".join(texts) + "\n"


def outcomes(folder, text):
    """What becomes of each example on a page, from first to last."""
    path = folder / "page.md"
    path.write_text(text)
    found = []
    for example in Document.parse(str(path), *PARSERS):
        try:
            example.evaluate()
            found.append("passed")
        except SkipTest:
            found.append("skipped")
        except SybilFailure:
            found.append("failed")
    return found


@pytest.mark.parametrize(
    ("code", "shown", "outcome"),
    [
        (TWO_LINES, "  7.39 a\n 10.76 b", "passed"),
        (TWO_LINES, " 7.39 a\n10.76 b", "failed"),
        (TWO_LINES, "7.39 a\n 10.76 b", "failed"),
        ("print('  a')\nprint('  b')", "  a\n  b", "passed"),
        ("print('a')\nprint('b')", "  a\n  b", "failed"),
        ("print('a')", "a", "passed"),
        ("print('a ')\nprint()", "a", "passed"),
        ("print('a')", "b", "failed"),
        ("print()", "", "passed"),
        ("print('a')\nprint()\nprint('b')", "a\n\nb", "passed"),
    ],
)
def test_leading_blanks_of_output_lines_are_compared(tmp_path, code, shown, outcome):
    text = page(("python", code), ("output", shown))
    assert outcomes(tmp_path, text) == ["passed", outcome]
    within = textwrap.indent(text, "    ")
    assert outcomes(tmp_path, within) == ["passed", outcome]


def test_output_of_a_skipped_block_is_skipped_too(tmp_path):
    first, second = ("python", "print('a')"), ("python", "print('b')")
    text = page(first, ("output", "a"), SKIPPED, second, ("output", "b"), first, ("output", "b"))
    ran = ["passed", "passed"]
    assert outcomes(tmp_path, text) == [*ran, "passed", "skipped", "skipped", "passed", "failed"]
    alone = page(SKIPPED, second, ("output", "b"))
    assert outcomes(tmp_path, alone) == ["passed", "skipped", "skipped"]
    not_skipped = page(SKIPPED.replace("True", "False"), second, ("output", "b"))
    assert outcomes(tmp_path, not_skipped) == ["passed", "passed", "passed"]
