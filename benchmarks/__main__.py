"""``python -m benchmarks``: measure, and make the tables and charts of the docs."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.catalogue import WORKLOADS
from benchmarks.workload import Numbers, Workload, medians

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
RESULTS = "benchmarks.jsonl"
DEVICE_RESULTS = "device.jsonl"
DEFAULT_ROUNDS = 3


def measure(job: dict[str, Any], python: str = sys.executable) -> Numbers:
    """Measure one variant of a workload in a fresh process and return its numbers."""
    command = [python, "-m", "benchmarks", "worker", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the workload {job['name']} {job['variant']} failed")
    return json.loads(done.stdout.strip().split("\n")[-1])


def work(job: dict[str, Any]) -> None:
    """Be the fresh process."""
    import torch
    from transformers.utils import logging

    from benchmarks.peer import add_peer
    from benchmarks.systems import DEVICE

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    torch.set_num_threads(job["threads"])
    DEVICE[0] = job["device"] or "cpu"
    add_peer(job["peer"])
    workload = WORKLOADS[job["name"]]
    print(json.dumps(workload.measure(job["variant"], job["repeats"], job["device"])))


def describe_machine(threads: int, device: str | None) -> str:
    """Name the processor, or the device."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().split("\n") if line.startswith("model name")]
        model = names[0].split(":")[1].strip() if names else model
    if device:
        import torch

        model += f" with {torch.cuda.get_device_name(device)}" if device != "cpu" else ""
    return f"{model}, {threads} threads"


def versions(peer: str | None, backend: str | None) -> dict[str, str]:
    """The versions that matter."""
    found = {"Python": platform.python_version()}
    packages = ("mlx", "mlx-lm", "torch") if backend == "mlx" else ("torch",)
    for package in (*packages, "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, "the peer": "genlm-backend 0.3.1"} if peer else found


def pythons(options: argparse.Namespace) -> dict[str, str | None]:
    """Return the interpreters of environments of their own, by what workloads need."""
    names = {"vllm": "vllm_python", "clients": "clients_python", "lm-eval": "lm_eval_python"}
    return {needed: getattr(options, name) for needed, name in names.items()}


def variants_of(workload: Workload, options: argparse.Namespace) -> list[str]:
    """Return what can be measured of a workload with these options."""
    python = pythons(options)
    if workload.needs in python and not (python[workload.needs] or options.names):
        return []
    if workload.needs == "device" and not options.device:
        return []
    if workload.needs == "mlx" and options.backend != "mlx" and not options.names:
        return []
    without_peer = () if options.peer else workload.peers
    return [variant for variant in workload.variants if variant not in without_peer]


def peer_for(workload: Workload, variant: str, options: argparse.Namespace) -> str | None:
    """Return the peer's folder; where the peer is a variant, the others do not have it."""
    is_there = not workload.peers or variant in workload.peers
    return options.peer if is_there and workload.takes_peer else None


def run(options: argparse.Namespace) -> None:
    """Measure what was asked for and write a line of JSON for each process."""
    start = time.perf_counter()
    unknown = set(options.names) - set(WORKLOADS)
    if unknown:
        raise SystemExit(f"no workload {min(unknown)!r}; there are {', '.join(WORKLOADS)}")
    path = options.output / RESULTS
    others = [name for name in options.names if WORKLOADS[name].needs != options.backend]
    if options.backend and others:
        raise SystemExit(f"the workload {others[0]!r} is not one of --backend {options.backend}")
    of_backend = [name for name in WORKLOADS if WORKLOADS[name].needs == options.backend]
    chosen = options.names or (of_backend if options.backend else [])
    names = chosen or list(WORKLOADS)
    kept = read(path) if path.exists() and chosen else []
    kept = [line for line in kept if line["workload"] not in names]
    command = " ".join(["python -m benchmarks run", *options.names])
    if options.backend:
        command += f" --backend {options.backend}"
    if options.peer and not chosen:
        command = "make bench"
    if options.rounds != DEFAULT_ROUNDS:
        option = "ROUNDS=" if command == "make bench" else "--rounds "
        command += f" {option}{options.rounds}"
    about = {
        "machine": describe_machine(options.threads, options.device),
        "versions": versions(options.peer, options.backend),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    lines, failed = [], dict[str, str]()
    for name in names:
        workload = WORKLOADS[name]
        rounds = options.rounds if workload.is_repeated else 1
        for number in range(rounds):
            for variant in variants_of(workload, options):
                label = " ".join(filter(None, [name, variant]))
                if sys.stderr.isatty() and not options.quiet:
                    at = f"[{time.perf_counter() - start:5.0f} s]"
                    print(f"{at} {label}, round {number + 1} of {rounds}", file=sys.stderr)
                job = {
                    "name": name,
                    "variant": variant,
                    "repeats": 1 if workload.is_repeated else options.rounds,
                    "peer": peer_for(workload, variant, options),
                    "device": options.device,
                    "threads": options.threads,
                }
                python = pythons(options).get(workload.needs or "")
                try:
                    numbers = measure(job, python or sys.executable)
                except RuntimeError as error:  # what else there is to measure is not lost
                    failed[name] = str(error)
                    print(error, file=sys.stderr)
                    break
                lines.append(
                    {
                        "workload": name,
                        "variant": variant,
                        "round": number,
                        "medians": medians(numbers),
                        "numbers": numbers,
                        **about,
                    }
                )
    options.output.mkdir(parents=True, exist_ok=True)
    before = read(path) if path.exists() else []
    kept += [line for line in before if line["workload"] in failed and line not in kept]
    lines = [line for line in lines if line["workload"] not in failed]
    order = list(WORKLOADS)
    whole = sorted([*kept, *lines], key=lambda line: order.index(line["workload"]))
    path.write_text("".join(json.dumps(line) + "\n" for line in whole))
    report(options)
    if failed:
        raise SystemExit("; ".join(failed.values()))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of results of workloads that there are."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["workload"] in WORKLOADS]


def report(options: argparse.Namespace) -> None:
    """Make the tables and charts from the results on file."""
    from benchmarks.report import charts, tables

    lines = read(options.output / RESULTS)
    for name, text in tables(lines).items():
        (options.output / f"{name}.md").write_text(text)
        print(f"\n{text}")
    charts(lines, options.output)
    on_device = options.output / DEVICE_RESULTS
    if on_device.exists():
        from benchmarks.device_report import device_chart, device_tables

        found = [json.loads(line) for line in on_device.read_text().splitlines()]
        for name, text in device_tables(found).items():
            (options.output / f"{name}.md").write_text(text)
        device_chart(found, options.output)


def list_workloads(options: argparse.Namespace) -> None:
    """Print every workload."""
    for name, workload in WORKLOADS.items():
        needed = workload.needs or ""
        is_python = needed in ("vllm", "clients", "lm-eval")
        option = f"{needed}-python" if is_python else {"mlx": "backend mlx"}.get(needed, needed)
        needs = f" (--{option})" if option else ""
        print(f"{name:<18}{workload.title}{needs}")


def main() -> None:
    """Parse the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | run | report")
    commands.add_parser("list", help="every workload, with a line about it")
    for name, text in (("run", "measure and report"), ("report", "only make tables and charts")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--output", type=Path, default=ASSETS, help="folder of the results")
        if name == "run":
            command.add_argument("names", nargs="*", help="workloads; all by default")
            command.add_argument("--quiet", action="store_true", help="show no progress")
            command.add_argument("--device", help="measure there, such as cuda")
            command.add_argument(
                "--backend",
                choices=["mlx"],
                help="only what is of this backend (minutes)",
            )
            command.add_argument("--peer", help="folder that holds genlm-backend 0.3.1")
            command.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
            command.add_argument("--clients-python", help="interpreter with genlm-control, llamppl")
            command.add_argument("--lm-eval-python", help="interpreter with lm-eval")
            command.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
            command.add_argument("--threads", type=int, default=2)
    commands.add_parser("worker").add_argument("job", type=json.loads)
    options = parser.parse_args()
    if options.command == "worker":
        work(options.job)
    else:
        {"list": list_workloads, "run": run, "report": report}[options.command](options)


if __name__ == "__main__":
    main()
