"""How much of a wrong program the tests notice: random changes to the pure files, one at a time.

Each change is made in a copy of the project and the tests that are to notice it run there. What
none of them notices is shown as a difference. ``make mutants`` runs a hundred changes; how to
read them is in CONTRIBUTING.md.

Some places are left out, since a change there is no wrong program: what an error says,
``__repr__``, and the following, of which the output tells how many changes there would have been:

- Numbers that were tuned: constants of a module or a class whose own docstring says so, by one of
  the words "measured", "cost", "worth" and "takes as long", and those of a class whose docstring
  begins with "Costs". Another number makes the program slower or faster, and no answer another one.
- ``strict=True`` of ``zip``, which asserts that lengths are equal that always are.

Tests that fail where nothing is changed notice nothing, and end the run.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from tests.concerning import PACKAGE, PURE, concerning

ROOT = Path(__file__).parent.parent
_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip

_TUNED = re.compile(r"\b(measured|costs?|worth|takes (\w+ )*as long)\b")
_NUMBER = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)

# A search for the smallest example would only take time.
_CONFTEST = """
from hypothesis import Phase, settings
settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], deadline=None)
settings.load_profile("mutants")
"""


@dataclass(frozen=True)
class Mutant:
    """A change to one file.

    Attributes:
        path: The file, from the project's root.
        source: The whole of it, changed.
        line: Where, from 1.
        idle: Kind of changes that make no wrong program, if it is one of such.
    """

    path: Path
    source: str
    line: int
    idle: str = ""

    def difference(self) -> str:
        """Return the change as ``diff -u`` writes it, without its heading."""
        before = (ROOT / self.path).read_text().splitlines()
        lines = difflib.unified_diff(before, self.source.splitlines(), n=1, lineterm="")
        return "\n".join([f"{self.path}:{self.line}", *list(lines)[3:]])


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every change that is made to one file."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    tree = ast.parse(source)
    idle = {part: "tuned numbers" for one in _tuned(tree) for part in ast.walk(one)}
    idle.update((one, "assertions of zip") for one in _strict(tree))
    for node, text in _changes(tree):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        changed = source[:begin] + text.encode() + source[end:]
        kind = idle.get(node, "") if isinstance(node, ast.Constant) else ""
        yield Mutant(path, changed.decode(), node.lineno, kind)


def _tuned(scope: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """Yield the constants of a module, and of its classes, that are documented as tuned."""
    is_of_costs = (ast.get_docstring(scope) or "").startswith("Costs ")
    for statement, behind in pairwise([*scope.body, ast.Pass()]):
        if isinstance(statement, ast.ClassDef):
            yield from _tuned(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            is_number = all(isinstance(part, _NUMBER) for part in ast.walk(statement.value))
            if is_number and (is_of_costs or _TUNED.search(_docstring(behind))):
                yield statement


def _strict(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the values of ``strict`` in calls of ``zip``."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "zip":
            yield from (keyword.value for keyword in call.keywords if keyword.arg == "strict")


def _docstring(behind: ast.stmt) -> str:
    """Return the docstring that a statement behind a constant is, or nothing."""
    if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
        return str(behind.value.value)
    return ""


def _changes(node: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield nodes below ``node``, and what to write in the place of each."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_idle(child):
                if isinstance(child, (ast.stmt, ast.expr)):
                    yield from ((child, text) for text in _replacements(child))
                # What an error says is nobody's business here; that it is raised is.
                if not isinstance(child, (ast.Raise, ast.JoinedStr)):
                    yield from _changes(child)


def _is_idle(node: ast.AST) -> bool:
    """Whether nothing that runs would change: imports, docstrings, types, ``__repr__``."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.Pass)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__slots__", "__all__"):
        return True
    is_cast = isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "TypeVar")
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return is_cast or (is_function and node.name in ("__repr__", "__str__"))


def _replacements(node: ast.stmt | ast.expr) -> Iterator[str]:
    """Yield what may be written in the place of one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        yield _with(node, ops=[_SWAPPED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _SWAPPED:
        yield _with(node, op=_SWAPPED[type(node.op)]())
    elif isinstance(node, ast.AugAssign) and type(node.op) in _SWAPPED:
        yield _with(node, op=_SWAPPED[type(node.op)]())
        yield "pass"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield str(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return None"
    elif _does_something(node):
        yield "pass"


def _does_something(node: ast.stmt | ast.expr) -> bool:
    """Whether a statement can be left out, so that names stay bound and blocks are not empty."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.Await))
    if isinstance(node, ast.Assign):
        return not isinstance(node.targets[0], ast.Name)
    return isinstance(node, (ast.Break, ast.Continue, ast.Raise, ast.Delete))


def _with(node: ast.stmt | ast.expr, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    text = ast.unparse(changed)
    return text if isinstance(node, ast.stmt) else f"({text})"


def passes(folder: Path, tests: str, seconds: float) -> bool:
    """Whether all tests of a file or folder pass in a copy of the project, and in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "timeout=60"]  # seconds for each test: what hangs has failed
    command += ["-m", "not slow and not real and not gpu and not vllm", tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


@contextmanager
def made(mutant: Mutant, folder: Path) -> Iterator[None]:
    """Make a change in a copy of the project for a while."""
    target = folder / mutant.path
    original = target.read_text()
    target.write_text(mutant.source)
    try:
        yield
    finally:
        target.write_text(original)


@dataclass(frozen=True)
class Judge:
    """Tests that are run with a change.

    Attributes:
        seconds: For each file of tests.
        sound: Files and folders of tests that are known to pass where nothing is changed.
    """

    seconds: float
    sound: set[str] = field(default_factory=set)

    def is_missed(self, mutant: Mutant, folder: Path, tests: tuple[str, ...]) -> bool:
        """Whether no test notices a change, which is made in ``folder`` for as long as they run.

        Raises:
            RuntimeError: If what fails does so without the change.
        """
        with made(mutant, folder):
            failed = next((one for one in tests if not passes(folder, one, self.seconds)), None)
        if failed is None:
            return True
        if failed not in self.sound:
            if not passes(folder, failed, self.seconds):
                raise RuntimeError(f"{failed} fails where nothing is changed")
            self.sound.add(failed)
        return False


def make_copy(folder: Path) -> Path:
    """Copy to ``folder`` what the tests need of the project."""
    for name in ("genlm_backend", "genlm", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "conftest.py").write_text(_CONFTEST)
    return folder


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main() -> int:
    """Make changes, show those that nobody notices, and fail where they are too many."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--num", type=int, default=100, help="changes to make")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of changes")
    parser.add_argument("--only", default="", help="files whose path begins so")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=300, help="for each file of tests")
    parser.add_argument("--at-least", type=float, default=0.95, help="share to be noticed")
    arguments = parser.parse_args()

    tests_of = {
        path.relative_to(ROOT): concerning(path.relative_to(ROOT / PACKAGE))
        for name in PURE
        for path in _files(ROOT / PACKAGE / name)
        if str(path.relative_to(ROOT / PACKAGE)).startswith(arguments.only)
    }
    found = [mutant for path in tests_of for mutant in mutants_of(path)]
    every = [mutant for mutant in found if not mutant.idle]
    chosen = random.Random(arguments.seed).sample(every, min(arguments.num, len(every)))
    judge = Judge(arguments.seconds)
    with tempfile.TemporaryDirectory() as temporary:
        folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(arguments.processes):
            folders.put(make_copy(Path(temporary) / str(number)))

        def try_one(mutant: Mutant) -> bool:
            folder = folders.get()
            try:
                is_missed = judge.is_missed(mutant, folder, tests_of[mutant.path])
            finally:
                folders.put(folder)
            print(f"\n{mutant.difference()}" if is_missed else ".", end="", flush=True)
            return is_missed

        with ThreadPoolExecutor(arguments.processes) as pool:
            num_noticed = len(chosen) - sum(pool.map(try_one, chosen))
    print(f"\n{num_noticed} of {len(chosen)} changes noticed, of {len(every)} there are")
    for kind, count in Counter(mutant.idle for mutant in found if mutant.idle).items():
        print(f"{count} changes of {kind} were left out")
    return 0 if num_noticed >= arguments.at_least * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
