"""``python -m benchmarks run``: measure, then write the table and the chart of the docs."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
SINGLE = (
    "smc",
    "step_overhead",
    "prefill_mix",
    "loop_stall",
    "python_meanwhile",
    "awaits",
    "import_time",
    "decoding",
    "sampling",
    "masks",
    "async_glm",
    "engine",
)
TRIES = ("SmolLM2", "Tekken", "Tekken + DeepSeek")
FAST = {"genlm_backend", "peer + cache_kv", "generate"}


def measure(
    name: str,
    arguments: dict[str, Any],
    peer: str | None,
    threads: int,
    python: str = sys.executable,
) -> Any:
    """Run one workload in a fresh process and return its numbers."""
    job = json.dumps({"name": name, "arguments": arguments, "peer": peer, "threads": threads})
    command = [python, "-m", "benchmarks", "worker", job]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the workload {name} {arguments} failed")
    return json.loads(done.stdout.strip().split("\n")[-1])


def work(job: dict[str, Any]) -> None:
    """Be the fresh process."""
    import torch

    from benchmarks import systems, tries, virtual, workloads

    torch.set_num_threads(job["threads"])
    systems.add_peer(job["peer"])
    modules = {"trie": tries, "vllm": virtual}
    module = modules.get(job["name"].split("_")[0], workloads)
    print(json.dumps(getattr(module, job["name"])(**job["arguments"])))


def describe_machine(threads: int) -> str:
    """Name the processor and the versions that matter."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().split("\n") if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    versions = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers"))
    return f"{model}, {threads} threads, Python {platform.python_version()}, {versions}"


def run(options: argparse.Namespace) -> None:
    """Measure what was asked for, the systems of SIS in turns, and write the results."""
    start = time.perf_counter()
    known = ("sis", *SINGLE, "tries", "vllm")
    unknown = set(options.names) - set(known)
    if unknown:
        raise SystemExit(f"no workload {min(unknown)!r}; there are {', '.join(known)}")
    names = options.names or known
    path = options.output / "benchmarks.json"
    results: dict[str, Any] = json.loads(path.read_text()) if options.names else {}

    def note(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    def one(name: str, **arguments: Any) -> Any:
        note(" ".join([name, *(value for value in arguments.values() if isinstance(value, str))]))
        return measure(name, arguments, options.peer, options.threads)

    if "sis" in names:
        results["sis"] = run_sis(options, note)
    for name in SINGLE:
        if name in names:
            results[name] = one(name, repeats=options.rounds)
    if "tries" in names:
        results["trie_speed"] = {
            name: one("trie_speed", vocabulary=name, repeats=options.rounds) for name in TRIES
        }
        results["trie_async"] = {
            name: one("trie_async", vocabulary=name, repeats=options.rounds) for name in TRIES[:2]
        }
        results["trie_first_call"] = one("trie_first_call", repeats=options.rounds)
        if options.device:
            results["trie_device"] = {
                name: one(
                    "trie_device", vocabulary=name, repeats=options.rounds, device=options.device
                )
                for name in TRIES
            }
    if "vllm" in names and (options.vllm_python or options.names):
        results["vllm"] = run_virtual(options, note)
    command = "make bench" if options.peer else "python -m benchmarks run"
    if options.names:
        again = f", in part again by run {' '.join(options.names)}"
        command = results["command"].removesuffix(again) + again
    results["command"] = command
    if not options.names:
        results["machine"] = describe_machine(options.threads)
        if options.peer:
            results["machine"] += "; the peer is genlm-backend 0.3.1"
    options.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    report(options)
    note(f"wrote benchmarks.json and the tables and the chart made of it to {options.output}")


def run_sis(options: argparse.Namespace, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure the systems of SIS in turns."""
    systems = ["genlm_backend", "generate"]
    if options.peer:
        systems += ["peer + cache_kv", "peer"]
    results: dict[str, Any] = {name: [] for name in systems}
    for round_number in range(options.rounds):
        for name in systems:
            note(f"SIS, round {round_number + 1} of {options.rounds}: {name}")
            arguments = {"system": name, "repeats": 3 if name in FAST else 1}
            numbers = measure("sis", arguments, options.peer, options.threads)
            results[name].append(numbers)
            note("  " + ", ".join(f"{rate:.1f}" for rate in numbers["tokens_per_second"]))
    return results


def run_virtual(options: argparse.Namespace, note: Callable[[str], None]) -> dict[str, Any]:
    """Measure vLLM and, in turns with it, the Hugging Face backend under the same Python."""
    python = options.vllm_python or sys.executable
    results: dict[str, Any] = {"vllm_sis": [], "vllm_plain": [], "vllm_beside": []}
    for round_number in range(options.rounds):
        for name, found in results.items():
            note(f"{name}, round {round_number + 1} of {options.rounds}")
            found.append(measure(name, {"repeats": 2}, options.peer, options.threads, python))
    return results


def report(options: argparse.Namespace) -> None:
    """Make the table and the chart from the results on file."""
    from benchmarks.report import chart, markdown, markdown_of_tries, markdown_of_virtual

    results = json.loads((options.output / "benchmarks.json").read_text())
    tables = {"benchmarks": markdown, "tries": markdown_of_tries, "virtual": markdown_of_virtual}
    for name, table in tables.items():
        text = table(results)
        (options.output / f"{name}.md").write_text(text)
        print(f"\n{text}")
    chart(results, options.output / "benchmarks.png")


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "report"):
        command = commands.add_parser(name)
        command.add_argument("--output", type=Path, default=ASSETS)
        if name == "run":
            command.add_argument("names", nargs="*", help="workloads; all by default")
            command.add_argument("--device", help="also measure tries there, such as cuda")
            command.add_argument("--peer", help="folder that holds genlm-backend 0.3.1")
            command.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
            command.add_argument("--rounds", type=int, default=3)
            command.add_argument("--threads", type=int, default=2)
    commands.add_parser("worker").add_argument("job", type=json.loads)
    options = parser.parse_args()
    if options.command == "worker":
        work(options.job)
    else:
        {"run": run, "report": report}[options.command](options)


if __name__ == "__main__":
    main()
