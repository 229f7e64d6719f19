"""Classes are abstract or final, and a method that has a body is not overridden."""

import ast
import functools
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

import genlm_backend

ROOT = Path(genlm_backend.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Models as they are, which programs may extend, and backends by constructors and methods.
EXTENSIBLE = {"AsyncTransformer", "BatchedLM", "MockAsyncLM"}

# Optional capabilities: what a class can do without has a default, and may be overridden.
DEFAULTS = {
    "Attend": {"keep", "reading"},
    "AsyncLM": {
        "_pictured",
        "_scores",
        "_scores_sync",
        "_scorings",
        "add_new_lora",
        "batch_next_token_logprobs",
        "batch_next_token_logprobs_sync",
        "batch_read",
        "batch_read_sync",
        "batch_sample",
        "check_adapter",
        "clear_cache",
        "close",
        "eos_token_ids",
        "forget",
        "kv_capacity",
        "next_token_logits",
        "num_cached_tokens",
        "read",
        "read_sync",
        "remove_lora",
        "sample",
        "statistics",
    },
    "BatchedLM": {"_asking", "_is_kept", "_number_of"},
    "Evaluator": {"load_prefix", "picture_rules", "save_prefix"},
    "VocabularyTrie": {"release"},
}

# What a library adds to the bases of its own classes.
MIXINS = {"RowExtension"}


@dataclass(eq=False)
class Class:
    """A class of the package as its source defines it."""

    path: Path
    node: ast.ClassDef
    foreign: set[str] = field(default_factory=set)
    parents: "list[Class]" = field(default_factory=list)
    children: "list[Class]" = field(default_factory=list)

    @property
    def name(self):
        return self.node.name

    @property
    def place(self):
        return f"{self.path.relative_to(ROOT.parent)}:{self.node.lineno}: {self.name}"

    @cached_property
    def methods(self):
        return {
            part.name: decorators(part)
            for part in self.node.body
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    @property
    def decorators(self):
        return decorators(self.node)

    @cached_property
    def ancestors(self):
        found = list(self.parents)
        for parent in self.parents:
            found += parent.ancestors
        return found

    @property
    def unimplemented(self):
        """Abstract methods of the class and its ancestors that nothing implements."""
        found = set().union(*(parent.unimplemented for parent in self.parents))
        found -= {name for name in self.methods if not is_abstract(self.methods[name])}
        return found | {name for name in self.methods if is_abstract(self.methods[name])}

    @property
    def is_abstract(self):
        return bool({"ABC", "Protocol"} & self.foreign or self.unimplemented)

    @property
    def is_value(self):
        """Whether it is an exception, a dataclass, an enumeration or a named tuple."""
        bases = set().union(*(each.foreign for each in [self, *self.ancestors]))
        is_error = any(base.endswith(("Error", "Exception")) for base in bases)
        is_constant = bool({"NamedTuple", "Enum", "StrEnum"} & bases)
        return is_error or is_constant or "dataclass" in self.decorators


def decorators(node):
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {ast.unparse(call).rpartition(".")[2] for call in calls}


def is_abstract(names):
    return "abstractmethod" in names


@functools.cache
def read_classes():
    found, imports = {}, {}
    for path in FILES:
        tree = ast.parse(path.read_text())
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[module, node.name] = Class(path, node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    imports[module, alias.asname or alias.name] = (node.module, alias.name)
    for (module, _), each in found.items():
        for base in each.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            name = ast.unparse(base).rpartition(".")[2]
            key = imports.get((module, name), (module, name))
            if key in found:
                each.parents.append(found[key])
                found[key].children.append(each)
            else:
                each.foreign.add(name)
    return list(found.values())


def faults(each):
    """What is wrong with a class, and with what its ancestors leave to it."""
    is_open = each.is_abstract or each.is_value or each.name in EXTENSIBLE
    if each.children and not is_open:
        yield "has subclasses and is not abstract"
    is_leaf = not (each.children or is_open or each.name in MIXINS)
    if is_leaf and "final" not in each.decorators:
        yield "is neither abstract nor final"
    for name in each.methods:
        if name.startswith("__") and name.endswith("__"):
            continue
        for other in each.ancestors:
            is_default = name in DEFAULTS.get(other.name, ())
            if name in other.methods and not is_abstract(other.methods[name]) and not is_default:
                yield f"overrides {other.name}.{name}, which has a body"


@pytest.mark.parametrize(
    "path",
    FILES,
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_classes_are_abstract_or_final(path):
    found = [each for each in read_classes() if each.path == path]
    assert not [f"{each.place} {fault}" for each in found for fault in faults(each)]


def test_every_default_is_one():
    """Defaults are methods with a body, and some class overrides each of them."""
    for owner, names in DEFAULTS.items():
        (owned,) = [each for each in read_classes() if each.name == owner]
        for name in names:
            assert not is_abstract(owned.methods[name])
            heirs = [each for each in read_classes() if owned in each.ancestors]
            assert any(name in each.methods for each in heirs), f"{owner}.{name}"
