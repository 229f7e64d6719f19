"""Every Python block in the README and the docs runs as a test, and prints its output there."""

import contextlib
import gc
import io
import signal
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import settings
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from tests.processor import has_int8_products

settings.register_profile("busy machines", deadline=None)
settings.load_profile("busy machines")


class Printing(PythonEvaluator):
    """Runs a block, and keeps what it prints."""

    def __call__(self, example: Example) -> None:
        """Run the block of an example."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            super().__call__(example)
        example.namespace["_printed"] = printed.getvalue()


def check_output(example: Example) -> str | None:
    """Compare a block of output with what the block of code before it has printed."""
    shown: Any = example.parsed.strip()
    printed = example.namespace["_printed"].strip()
    return None if shown == printed else f"it printed\n{printed}\nand not\n{shown}"


pytest_collect_file = Sybil(
    parsers=[
        CodeBlockParser("python", Printing()),
        CodeBlockParser("output", check_output),
        SkipParser(),
    ],
    patterns=["README.md", "docs/*.md"],
    setup=lambda namespace: namespace.update(
        find_spec=find_spec, has_int8_products=has_int8_products, __name__="__main__"
    ),
).pytest()


gc.disable()  # until all tests are collected: what that makes stays


def pytest_collection_finish() -> None:
    """Look for garbage from here on, and no more at modules and tests, which stay to the end."""
    gc.freeze()
    gc.enable()


def pytest_configure() -> None:
    """Let a Ctrl-C be one: a shell starts what runs in the background with interrupts ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Blocks of the docs load the bundled model."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.real)
            if item.path.name == "llama-cpp.md":
                item.add_marker(pytest.mark.llama_cpp)
            if item.path.name == "vllm.md":
                item.add_marker(pytest.mark.vllm)
                item.add_marker(pytest.mark.timeout(300))
