"""Blocks of Python in the docs, which are run, and the blocks of output behind them."""

import contextlib
import io
from unittest import SkipTest

from sybil import Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser


class Printing(PythonEvaluator):
    """Runs a block, and keeps what it prints."""

    def __call__(self, example: Example) -> None:
        """Run the block of an example."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            super().__call__(example)
        example.namespace["_printed"] = example.start, printed.getvalue()


def check_output(example: Example) -> str | None:
    """Compare a block of output with what the block of code before it has printed.

    Raises:
        SkipTest: If that block has not run, because it was skipped.
    """
    last, printed = example.namespace.get("_printed", (-1, ""))
    if last != _code_before(example):
        raise SkipTest("the block of code before it has not run")
    shown = _ended(_shown(example))
    printed = _ended(printed)
    return None if shown == printed else f"it printed\n{printed}\nand not\n{shown}"


def _code_before(example: Example) -> int:
    """Return where the last block of code before an example begins."""
    regions = [region for start, region in example.document.regions if start < example.start]
    return max(own.start for own in regions if own.lexemes.get("arguments") == "python")


def _shown(example: Example) -> str:
    """Return the text of a block as it stands; Sybil takes away the blanks that its lines share."""
    fence, *lines, _ = example.document.text[example.start : example.end].split("\n")
    indent = len(fence) - len(fence.lstrip())
    return "\n".join(line[indent:] for line in lines)


def _ended(text: str) -> str:
    return text.strip("\n").rstrip()


PARSERS = [
    CodeBlockParser("python", Printing()),
    CodeBlockParser("output", check_output),
    SkipParser(),
]
