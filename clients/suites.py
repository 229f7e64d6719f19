"""The test suites of the programs that run on this library, and what of them cannot pass on it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """A test suite out of a source distribution.

    Attributes:
        distribution: Its name on PyPI.
        version: The release that is tested.
        folders: What is taken out of the distribution; the first one holds the tests.
        num_tests: How many tests it has, so that none is lost unnoticed.
        ignored: Files that test what this library does not have, or need a device.
        expected_failures: Test, or test without its parameters → why it cannot pass here.
    """

    distribution: str
    version: str
    num_tests: int
    folders: tuple[str, ...] = ("tests",)
    ignored: tuple[str, ...] = ()
    expected_failures: dict[str, str] = field(default_factory=dict)


SUITES = (
    Suite("llamppl", "0.2.3", 0, folders=("tests", "examples", "html")),
    Suite("genlm-bytes", "0.2.0", 0),
    Suite("genlm-backend", "0.3.1", 0),
    Suite("genlm-control", "0.4.1", 0),
)
