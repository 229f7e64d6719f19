"""Every Python block in the README and the docs runs as a test, and prints its output there."""

import gc
import os
import signal
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings
from sybil import Sybil

from tests.doc_blocks import PARSERS
from tests.processor import has_int8_products

# Nothing depends on a clock, which other programs slow; nor, by default, on chance or on CI=true.
settings.register_profile(
    "random",
    settings.get_profile("default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fixed", settings.get_profile("random"), derandomize=True)
settings.load_profile("fixed")

pytest_collect_file = Sybil(
    parsers=PARSERS,
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
    """Let a Ctrl-C be one, which a shell ignores in the background; have Ray of its own."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray would join a cluster of another test process, and die with it.
    os.environ.setdefault("RAY_ADDRESS", "local")


# Files that take minutes, which come first so that no core waits for one at the end.
LONGEST = ("test_examples.py", "test_histories.py", "test_processes.py", "test_ray.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; blocks of the docs load the bundled model."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.real)
            if item.path.name == "llama-cpp.md":
                item.add_marker(pytest.mark.llama_cpp)
            if item.path.name == "vllm.md":
                item.add_marker(pytest.mark.vllm)
                item.add_marker(pytest.mark.timeout(300))
