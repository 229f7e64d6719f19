"""The command line: ``python -m genlm_backend``."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from pathlib import Path

from genlm_backend.errors import GenlmBackendError, MissingExtraError
from genlm_backend.info import info


def example_path(name: str) -> Path:
    """Return the file of an example: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parent
    for folder in (package / "_examples", package.parent / "examples"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"the example {name} was not installed with the package")


def run_demo(arguments: list[str]) -> None:
    """Run ``examples/smc.py`` with the given arguments.

    Raises:
        MissingExtraError: If the extra ``demo`` is not installed.
    """
    missing = [name for name in ("rich", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the demo needs {' and '.join(missing)}: pip install 'genlm-backend[demo]'"
        )
    path = example_path("smc.py")
    sys.argv = ["python -m genlm_backend demo", *arguments]
    runpy.run_path(str(path), run_name="__main__")


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(
        prog="python -m genlm_backend",
        description="Awaitable language models for programs that steer them.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "demo",
        help="sequential Monte Carlo on a small real model; 'demo --help' lists its options",
        add_help=False,
    )
    commands.add_parser("info", help="versions, devices and extras, for bug reports")
    known, rest = parser.parse_known_args()
    if known.command == "info":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        print(info())
    if known.command == "demo":
        try:
            run_demo(rest)
        except GenlmBackendError as error:
            parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
