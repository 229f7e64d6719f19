"""``make gpu``: the tests marked ``gpu``, then what a device can do, on a machine with little else.

Each part is a process of its own, which ends within its time; its lines of JSON are in the folder
as soon as they are known, and a summary is printed last; ``results.jsonl`` has all of them. What is
missing is named and skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

Line = dict[str, Any]

TESTS = (
    "tests/llm/hf/test_gpu.py",
    "tests/llm/hf/test_gpu_answers.py",
    "tests/llm/test_contract.py",
    "tests/llm/test_contract_contexts.py",
    "tests/llm/test_contract_refusals.py",
    "tests/llm/test_contract_scores.py",
    "tests/llm/test_contract_trouble.py",
    "tests/llm/test_draw.py",
    "tests/llm/test_draw_next_token.py",
    "tests/llm/test_readouts.py",
    "tests/llm/test_sampling.py",
    "tests/generation/test_contract.py",
    "tests/trie/test_gpu.py",
    "tests/llm/vllm/test_gpu.py",
)

NEEDED = ("torch", "transformers", "tokenizers", "numpy", "numba", "psutil")
"""Modules without which nothing runs."""


def about(device: str, _: float) -> Iterator[Line]:
    """Yield what the machine is: device, driver, versions, what is missing."""
    import torch

    line: Line = {"python": platform.python_version(), "device": device}
    for package in ("torch", "transformers", "tokenizers", "numba", "vllm", "flashinfer-python"):
        try:
            line[package] = version(package)
        except PackageNotFoundError:
            line[package] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        line["name"], line["memory_GiB"] = properties.name, properties.total_memory / 2**30
        line["cuda"] = torch.version.cuda
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
            line["driver"] = told.strip().split("\n")[0]
        except OSError:
            line["driver"] = None
    yield line


def tests(_: str, deadline: float) -> Iterator[Line]:
    """Run the tests marked ``gpu``; yield the closing line of pytest for each file."""
    missing = [name for name in ("pytest", "pytest_asyncio") if not is_there(name)]
    if missing:
        yield {"skipped": f"{', '.join(missing)} not installed"}
        return
    for path in TESTS:
        options = ["-q", "-rfE", "--confcutdir=tests", "-m", "gpu"]
        options += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
        command = [sys.executable, "-m", "pytest", *options, path]
        left = deadline - time.monotonic()
        if left < 5:
            yield {"file": path, "skipped": "no time was left"}
            continue
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=left, cwd=ROOT
            )
        except subprocess.TimeoutExpired:
            yield {"file": path, "failed": "it ran out of time"}
            continue
        whole = f"{done.stdout}\n{done.stderr}".strip()
        said = done.stdout.strip().split("\n") if done.stdout.strip() else whole.split("\n")
        failed = [one for one in said if one.startswith(("FAILED", "ERROR"))]
        line = {"file": path, "rc": done.returncode, "closing": said[-1], "failures": failed}
        is_green = done.returncode in (0, 5)  # 5: nothing there to run
        yield line if is_green else {**line, "failed": said[-1], "output": whole[-4000:]}


def _measured(name: str, *given: str, needs: str = "torch") -> Any:
    def measure(device: str, deadline: float) -> Iterator[Line]:
        if not is_there(needs):
            yield {"skipped": f"{needs} is not installed"}
            return
        from benchmarks import device_parts

        yield from getattr(device_parts, name)(*given, device, deadline)

    return measure


MODELS = ("SmolLM2-135M", "Llama-3.2-1B", "Qwen3-8B")

PARTS: dict[str, Any] = {
    "machine": about,
    "tests": tests,
    "tries": _measured("tries"),
    "attention": _measured("attention"),
    "division": _measured("division"),
    **{f"steps-{model}": _measured("steps", model) for model in MODELS},
    **{f"generate-{model}": _measured("plain", model) for model in MODELS[:2]},
    **{f"vllm-{model}": _measured("by_vllm", model, needs="vllm") for model in MODELS[:2]},
}
"""What is done, in order."""


def is_there(module: str) -> bool:
    """Return whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


def work(part: str, device: str, allowed: float) -> None:
    """Be the process of one part: print a line as soon as it is known."""
    deadline = time.monotonic() + allowed
    for line in PARTS[part](device, deadline):
        print(json.dumps(line), flush=True)


def run_part(part: str, folder: Path, device: str, allowed: float) -> list[Line]:
    """Run one part in its process; return its lines, which are in the folder too."""
    command = [sys.executable, "-m", "benchmarks.device", str(folder), "--part", part]
    command += ["--device", device, "--seconds", str(allowed)]
    path = folder / f"{part}.jsonl"
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    start, failure = time.monotonic(), None
    with path.open("w") as out, (folder / f"{part}.log").open("w") as log:
        try:
            rc = subprocess.run(
                command, stdout=out, stderr=log, cwd=ROOT, env=environment, timeout=allowed + 60
            ).returncode
            failure = None if rc == 0 else f"ended with {rc}: {last_line(folder / f'{part}.log')}"
        except subprocess.TimeoutExpired:
            failure = "was stopped, out of time"
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.startswith("{")]
    ended: Line = {"part": part, "seconds": round(time.monotonic() - start, 1)}
    lines.append(ended if failure is None else {**ended, "failed": failure})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def last_line(log: Path) -> str:
    """Return what a part said last."""
    said = log.read_text(errors="replace").strip().split("\n")
    return f"{said[-1][:300]} ({log.name} has it all)"


def shown(line: Line) -> str:
    """Return a line as a person reads it."""
    said = (
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in line.items()
        if name != "output" and value not in (None, [])
    )
    return "  " + " ".join(said)


def main() -> None:
    """Run all parts, or be one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the lines of JSON go")
    parser.add_argument("--device", default="cuda", help="the device (cuda)")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS], help="which")
    parser.add_argument("--seconds", type=float, default=400, help="of each part, at most, about")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        work(options.part, options.device, options.seconds)
        return
    missing = [name for name in NEEDED if not is_there(name)]
    if missing:
        raise SystemExit(f"not installed, and nothing runs without: {', '.join(missing)}")
    import torch

    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise SystemExit(f"--device {options.device}: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} finds no CUDA device; --device cpu tries it all"
        )
    options.folder = options.folder.absolute()
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{options.folder} cannot be a folder: {error.strerror}") from error
    run = partial(run_part, device=options.device, allowed=options.seconds)
    found: dict[str, list[Line]] = {}
    for part in options.parts:
        print(f"{part} …", file=sys.stderr, flush=True)
        found[part] = run(part, options.folder)
    with (options.folder / "results.jsonl").open("w") as out:
        for part, lines in found.items():
            out.writelines(json.dumps({"from": part, **line}) + "\n" for line in lines)
    for part, lines in found.items():
        print(part, *map(shown, lines), sep="\n")
    if any("failed" in line or line.get("failures") for lines in found.values() for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
