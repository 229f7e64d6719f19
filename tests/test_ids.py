"""No code asks whether an id is true: 0 is an id like the others, and false."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("genlm_backend", "genlm", "examples", "benchmarks", "clients", "tests")
ID = re.compile(r"^(?!(is|has|can)_)(.*_)?(id|eos|bos|pad|unk|sep|cls)$")
"""Names of one id; a name of several ends with ``ids``, and is true where there are any."""


def name_of(node: ast.AST) -> str:
    """What an expression is called: a name, an attribute, a key, or what a look-up looks for."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return name
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
            return name
        case ast.NamedExpr(target=target):
            return name_of(target)
        case ast.Call(func=function):
            return name_of(function)
    return ""


def asked(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions whose truth is asked for where that of ``node`` is."""
    match node:
        case ast.BoolOp(values=values):
            for value in values:
                yield from asked(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from asked(operand)
        case _:
            yield node


def all_asked(tree: ast.AST) -> Iterator[ast.expr]:
    """Every expression of a program whose truth is asked for."""
    for node in ast.walk(tree):
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield from asked(test)
            case ast.Assert(test=test):
                yield from asked(test)
            case ast.comprehension(ifs=tests):
                for test in tests:
                    yield from asked(test)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from asked(operand)
            case ast.BoolOp(values=[*values, _]):  # the last is what it is, and is asked elsewhere
                for value in values:
                    yield from asked(value)
            case ast.Call(func=ast.Name(id="bool"), args=[value]):
                yield from asked(value)
            case ast.Call(func=ast.Name(id="any" | "all"), args=[value]):
                yield from elements(value)
            case ast.Call(func=ast.Name(id="filter"), args=[ast.Constant(value=None), value]):
                yield from elements(value)


def elements(node: ast.expr) -> Iterator[ast.expr]:
    """The elements of a collection, or a name of one where only the whole has one."""
    match node:
        case ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values):
            for value in values:
                yield from asked(value)
        case ast.GeneratorExp(elt=value) | ast.ListComp(elt=value):
            yield from asked(value)
        case _ if name_of(node).endswith("ids"):
            yield ast.Name(id=name_of(node).removesuffix("s"), lineno=node.lineno)


def faults(source: str) -> list[str]:
    """Where a program asks whether an id is true."""
    found = {
        f"{node.lineno}: {name_of(node)}"
        for node in all_asked(ast.parse(source))
        if ID.search(name_of(node))
    }
    return sorted(found)


def programs() -> dict[str, str]:
    """Every program of the repository: modules, blocks of the guides and cells of notebooks."""
    found = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S)):
            found[f"{path.name} block {number}"] = block
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for number, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "code":
                found[f"{path.name} cell {number}"] = "".join(cell["source"])
    return found


def test_no_program_asks_whether_an_id_is_true():
    found = programs()
    assert len(found) > 500
    assert {name: where for name, source in found.items() if (where := faults(source))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "start = tokenizer.bos_token_id or tokenizer.eos_token_id",
        "start = bos or eos or 0",
        "x = getattr(tokenizer, 'pad_token_id', None) or 0",
        "x = options.get('eos_token_id') or 3",
        "x = options['token_id'] and 1",
        "x = 1 if token_id else 2",
        "if not self.image_token_id: pass",
        "if x is None or (y and not eos): pass",
        "while token_id: pass",
        "x = [i for i in range(3) if token_id]",
        "if (token_id := found()): pass",
        "if next_token_id(): pass",
        "assert bool(eos)",
        "any([bos_token_id, eos_token_id])",
        "x = next(filter(None, [bos, eos]))",
        "any(token_ids)",
        "list(filter(None, self.token_ids))",
    ],
)
def test_the_ways_to_ask_so_are_found(source):
    assert len(faults(source)) >= 1


@pytest.mark.parametrize(
    "source",
    [
        "start = eos if bos is None else bos",
        "if token_ids: pass",
        "x = eos_token_ids or None",
        "if token_id in ends or token_id == 0: pass",
        "if tokenizer.bos_token: pass",
        "any(token_id > 3 for token_id in token_ids)",
        "x = token_id",
    ],
)
def test_what_asks_for_something_else_is_let_through(source):
    assert faults(source) == []
