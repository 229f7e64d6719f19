"""Docstrings read alone: what they are about is in them, and the first line is a sentence."""

import ast
import re
from pathlib import Path

import pytest

import genlm_backend

ROOT = Path(genlm_backend.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# What begins so has its subject elsewhere: in a name, a heading, or another entry.
NO_SUBJECT = ("Of", "As for", "As of", "That of", "Those of", "Likewise", "Which of")
BEGINNING = re.compile(rf"(?:{'|'.join(NO_SUBJECT)})\b")
VERBS = "Return|Yield|Write|Note|Say|Tell|Keep|Find|Make|Take|Run|Give"
WHAT = "[Ww]hat|[Ww]ho|[Ww]hatever|[Ww]hose|[Tt]hose"
NO_NOUN = re.compile(rf"(?:\w+: )?(?:(?:{VERBS}) )?(?:{WHAT})\b")
"""The first words of a docstring that says what it is about by no noun."""
ENTRY = re.compile(r"\s+\*{0,2}\w+(?: \([^)]*\))?: (.*)")


def public_parts(node, name):
    """The public definitions in a module, with their names; what is in functions is private."""
    yield node, name
    for child in getattr(node, "body", []):
        is_definition = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if not is_definition or child.name.startswith("_") or is_overload(child):
            continue
        if isinstance(child, ast.ClassDef):
            yield from public_parts(child, f"{name}.{child.name}")
        else:
            yield child, f"{name}.{child.name}"


def is_overload(node):
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return bool({"overload", "typing.overload"} & set(decorators)) or any(
        decorator.endswith((".setter", ".deleter")) for decorator in decorators
    )


def texts(tree):
    """Every docstring, those of private names and of assigned ones too, with its first line."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None)
            is_text = isinstance(statement, ast.Expr) and isinstance(value, ast.Constant)
            if is_text and isinstance(value.value, str):
                yield value.lineno, value.value


def faults(path):
    """What is wrong with the docstrings of a file, each with its line."""
    tree = ast.parse(path.read_text())
    for node, name in public_parts(tree, path.stem):
        text = ast.get_docstring(node)
        line = getattr(node, "lineno", 1)
        if not text:
            yield line, f"{name} has no docstring"
        elif not text.split("\n")[0].endswith((".", "?", ":")):
            yield line, f"{name}: the first line is no sentence"
    for first, text in texts(tree):
        if NO_NOUN.match(text):
            yield first, f"no noun: {text.splitlines()[0]}"
        for number, line in enumerate(text.split("\n"), start=first):
            entry = ENTRY.match(line)
            if BEGINNING.match(line.strip()) or (entry and BEGINNING.match(entry[1])):
                yield number, f"no subject: {line.strip()}"


@pytest.mark.parametrize(
    "path",
    FILES,
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_docstrings_read_alone(path):
    assert not [f"{path}:{line}: {fault}" for line, fault in faults(path)]
