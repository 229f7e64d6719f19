"""Every parameter that a public function of genlm-backend 0.3.1 takes is taken here, in its place.

The peer's are read off its source, since this library is in its place here, and since it has other
classes where vLLM and MLX are absent.
"""

import ast
import inspect
import os
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_REFUSED = "is refused on use, with the name of what takes its place"
_MACHINERY = "is what the caches and queues of 0.3.1 are made of"

EXCEPTIONS = {
    "cache.TokenTrie": _REFUSED,
    "llm.hf.Query": _REFUSED,
    "llm.sgl.AsyncSGLTransformer": _REFUSED,
    "llm.vllm.BackendScheduler": _REFUSED,
    "llm.hf.AsyncTransformer.add_query": _MACHINERY,
    "llm.hf.AsyncTransformer.walk_cache": _MACHINERY,
    "llm.vllm.AsyncVirtualLM.__init__": "takes what from_name makes, and no engine of vLLM's",
    "llm.vllm.AsyncVirtualLM.underlying_model": _MACHINERY,
    "llm.vllm.AsyncVirtualLM.release_all": _MACHINERY,
}
"""What is absent or takes other parameters, a class with all that it has, and the reason."""


def sources():
    """Return the peer's modules: their names after ``genlm.backend`` and their syntax trees."""
    (archive,) = Path(os.environ["CLIENTS"]).glob("genlm_backend-*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, *parts = Path(member.name).with_suffix("").parts
            if parts[:2] == ["genlm", "backend"] and member.name.endswith(".py"):
                file = tar.extractfile(member)
                assert file is not None
                path = [part for part in parts[2:] if part != "__init__"]
                yield path, ast.parse(file.read())


def definitions(body):
    """Yield the classes and functions of a module or class, in whatever branch they are made."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__init__" or not node.name.startswith("_"):
                yield node
        elif isinstance(node, ast.If | ast.Try):
            handlers = [handler.body for handler in getattr(node, "handlers", ())]
            for part in (node.body, node.orelse, *handlers):
                yield from definitions(part)


def functions():
    """Yield each public function, and each method with those that a class inherits.

    Returns:
        The module's path, the path within it, and the definition.
    """
    modules = list(sources())
    classes = {}
    for _, tree in modules:
        for node in definitions(tree.body):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def methods(node):
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        inherited = [methods(one) for base in bases for one in classes.get(base, ())]
        own = {method.name: method for method in definitions(node.body)}
        return {name: method for each in (*inherited, own) for name, method in each.items()}

    for path, tree in modules:
        for node in definitions(tree.body):
            if isinstance(node, ast.ClassDef):
                for name, method in methods(node).items():
                    yield path, [node.name, name], method
            else:
                yield path, [node.name], node


def of_peer(function, *, is_bound):
    """Return the names that a function takes by position and by name, and those it needs."""
    given, kinds = function.args, {ast.unparse(d) for d in function.decorator_list}
    positional = [a.arg for a in (*given.posonlyargs, *given.args)]
    needed = set(positional[: len(positional) - len(given.defaults)])
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    needed |= {a.arg for a, default in pairs if default is None}
    if is_bound and "staticmethod" not in kinds:
        needed.discard(positional.pop(0))
    return positional, [a.arg for a in given.kwonlyargs], needed


def difference(module, path, function):
    """Return how our function of a path differs from the peer's; empty if it does not."""
    subject: Any = import_module(".".join(("genlm.backend", *module)))
    owner = subject
    for name in path:
        owner = subject
        if not hasattr(owner, name):
            return "is absent"
        subject = getattr(owner, name)
    is_bound = inspect.isclass(owner)
    if any(ast.unparse(d).endswith(("property", ".setter")) for d in function.decorator_list):
        return ""
    parameters = list(inspect.signature(subject).parameters.values())
    if is_bound and inspect.isfunction(inspect.getattr_static(owner, path[-1])):
        del parameters[0]
    if [p.name for p in parameters] == ["args", "kwargs"]:  # it takes anything, and refuses it
        return ""
    by_position = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    by_name = {*by_position, *(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)}
    needed = {p.name for p in parameters if p.default is p.empty} & by_name
    positional, named, needed_there = of_peer(function, is_bound=is_bound)
    if missing := {*positional, *named} - by_name:
        return f"takes no {sorted(missing)}"
    if by_position[: len(positional)] != positional:
        return f"takes {by_position} in this order, and the peer {positional}"
    takes_any = function.args.vararg and function.args.kwarg  # what stands for an absent class
    if not takes_any and not needed <= needed_there:
        return f"needs {sorted(needed - needed_there)}"
    return ""


@pytest.mark.skipif("CLIENTS" not in os.environ, reason="needs the peer's source distribution")
def test_each_public_function_takes_the_parameters_of_the_peers():
    differences, compared = {}, 0
    for module, path, function in functions():
        compared += 1
        if found := difference(module, path, function):
            differences[".".join((*module, *path))] = found
    assert compared > 100
    excepted = {
        name: key for name in differences for key in EXCEPTIONS if f"{name}.".startswith(f"{key}.")
    }
    assert {n: found for n, found in differences.items() if n not in excepted} == {}
    assert set(EXCEPTIONS) == set(excepted.values())  # none that is none any more
