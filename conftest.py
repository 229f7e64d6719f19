"""Every Python block in the README and the docs runs as a test."""

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"]
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Blocks of the docs load the bundled model."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.real)
