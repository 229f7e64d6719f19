"""Examples, the command line and the benchmarks run and print what they promise."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.real


def run(*command, **options):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "COLUMNS": "100", "HF_HUB_OFFLINE": "1"},
        **options,
    )


def test_demo_prints_its_question_posterior_and_pass_counts():
    options = ["--particles", "5", "--tokens", "5", "--repeats", "2"]
    done = run("-m", "genlm_backend", "demo", *options)
    assert done.returncode == 0, done.stderr
    assert "'The sea is'" in done.stdout.split("Question: ")[1].split("\n")[0]
    unweighted, weighted = done.stdout.split("Without weights")[1].split("Posterior")
    assert re.search(r"worth [1-5]\.\d draws", unweighted)
    assert len(re.findall(r"^  0\.200  ['\"]The sea is", unweighted, re.M)) == 5
    shares = re.findall(r"^  (\d\.\d{3})  ['\"]The sea is", weighted, re.M)
    assert sum(map(float, shares)) == pytest.approx(1, abs=0.006)
    assert shares == sorted(shares, reverse=True)
    log_z, error, texts = re.findall(r"log Z (\S+) ± (\S+): one in (\d+) of", weighted)[0]
    assert float(error) > 0
    assert float(texts) == pytest.approx(math.exp(-float(log_z)), rel=0.01, abs=1)
    assert re.search(r"Effective sample size  [▁▂▃▄▅▆▇█]{5}  of 5\n", done.stdout)
    found = re.search(r"(\d+) forward passes; (\d+) tokens computed, (\d+) reused\n", done.stdout)
    assert found, done.stdout
    passes, computed, _ = map(int, found.groups())
    assert passes <= 2 * 6  # the repeats share passes
    assert computed < 3 * 5 * 5 + 10


def test_every_example_has_fewer_than_80_lines():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 80, path.name


def test_importance_sampling_makes_one_forward_pass_per_step():
    done = run("examples/sis.py", "--particles", "5", "--tokens", "4")
    assert done.returncode == 0, done.stderr
    *texts, counts = done.stdout.strip().split("\n")
    assert len(texts) == 5
    assert counts == "20 awaits in 4 passes"


def test_scoring_example_ranks_the_likeliest_text_first():
    done = run("examples/scoring.py")
    assert done.returncode == 0, done.stderr
    *texts, counts = done.stdout.strip().split("\n")
    assert texts[0].endswith("The capital of France is Paris.")
    assert texts[-1].endswith("Mat the on sat cat the.")
    found = re.search(r"^6 awaits, (\d+) tokens computed, (\d+) forward passes$", counts)
    assert found, counts
    assert int(found[1]) <= 40  # of 44, since beginnings are shared
    assert int(found[2]) <= 3


def test_lipogram_example_avoids_its_letters_and_batches_its_awaits():
    done = run(
        *("examples/lipogram.py", "--particles", "8", "--length", "15", "--without", "eo"),
    )
    assert done.returncode == 0, done.stderr
    *texts, model, trie = done.stdout.strip().split("\n")
    assert texts
    for text in texts:
        assert text.startswith("The sea is")
        assert not set(text.removeprefix("The sea is")) & set("eoEO")
    for line in (model, trie):
        found = re.search(r"^(\d+) awaits of the \w+ in (\d+) (forward passes|batches)$", line)
        assert found, line
        assert int(found[2]) * 3 < int(found[1])


def test_json_smc_example_prints_json_particles_and_log_z():
    done = run("examples/json_smc.py", "--particles", "4", "--tokens", "60")
    assert done.returncode == 0, done.stderr
    *lines, log_z = done.stdout.strip().split("\n")
    assert len(lines) == 4
    for line in lines:
        assert re.match(r" *-\d+\.\d\d  \{", line), line
    assert re.fullmatch(r"log Z -\d+\.\d\d", log_z)


def test_chat_example_answers_two_questions():
    questions = ["My name is Ada. What is the capital of France?", "What is my name?"]
    done = run("examples/stream_chat.py", *questions, "--tokens", "25")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert len(done.stdout.strip()) > 60


def test_async_glm_example_answers_every_thread():
    done = run("examples/async_glm.py", "--threads", "4", "--tokens", "6")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert len(done.stdout.strip().split("\n")) == 5


def test_engine_example_streams_awaits_and_stops_requests():
    done = run("examples/engine_requests.py", "--tokens", "6", "--max-batch", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().split("\n")
    assert lines[0].startswith("The capital of France is Paris")
    assert sum("(interrupted)" in line for line in lines) == 1
    cached = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens cached", done.stdout)]
    assert cached[0] < 10 < cached[1]


def test_help_lists_the_demo_and_a_typo_is_an_error():
    help_text = run("-m", "genlm_backend", "--help").stdout
    assert "demo" in help_text
    assert "sequential Monte Carlo" in help_text
    assert "--particles" in run("-m", "genlm_backend", "demo", "--help").stdout
    typo = run("-m", "genlm_backend", "dmeo")
    assert typo.returncode == 2
    assert "'dmeo' (choose from" in typo.stderr
    typo = run("-m", "genlm_backend", "demo", "--model", "smolm2")
    assert typo.returncode != 0
    assert "no model 'smolm2' could be loaded" in typo.stderr
    assert "Traceback" not in typo.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "workloads.sis('genlm_backend', 1, 3, 2)",
        "workloads.sis('generate', 1, 3, 2)",
        "workloads.sis('continuous batching', 1, 2, 2)",
        "workloads.smc(1)",
        "workloads.scoring(1, 8, 4)",
        "workloads.step_overhead(1)",
        "host.host(1, 2)",
        "host.plan(1)",
        "workloads.prefill_mix(1)",
        "workloads.loop_stall(1)",
        "workloads.python_meanwhile(1)",
        "workloads.awaits(1)",
        "workloads.import_time(1)",
        "workloads.decoding(1)",
        "generation.sampling(1)",
        "generation.masks(1)",
        "generation.async_glm(1, 3, 2)",
        "generation.engine(1, 5, 3)",
        "trace.trace(3)",
        "growth.particles(1, (1, 2))",
        "growth.context(1, (8, 16))",
        "growth.shared_context(1, (8, 16))",
        "sharing.measure('shared', 1, ((3, 8),), (2, 9))",
        "sharing.measure('gathered', 1, ((3, 8),), (2, 9))",
        "growth.vocabulary(1, (500, 1000))",
        "tries.trie_speed('SmolLM2', 1)",
        "tries.trie_async('Tekken + DeepSeek', 1)",
        "tries.trie_first_call(1)",
        "tries.trie_device('SmolLM2', 1, 'cpu')",
    ],
)
def test_every_benchmark_workload_runs_one_round(call):
    module = call.split(".")[0]
    done = run("-c", f"from benchmarks import {module}; print({call})")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().split("\n")[-1].startswith("{")


@pytest.mark.slow
def test_benchmark_run_replaces_only_the_lines_of_its_workload(tmp_path):
    import shutil

    listed = run("-m", "benchmarks", "list").stdout
    assert "growth            How cost grows" in listed
    typo = run("-m", "benchmarks", "run", "growht")
    assert typo.returncode != 0
    assert "no workload 'growht'" in typo.stderr
    shutil.copy(ROOT / "docs" / "assets" / "benchmarks.jsonl", tmp_path)
    before = [json.loads(line) for line in (tmp_path / "benchmarks.jsonl").read_text().splitlines()]
    options = ("--rounds", "1", "--output", str(tmp_path))
    done = run("-m", "benchmarks", "run", "import_time", *options)
    assert done.returncode == 0, done.stderr
    after = [json.loads(line) for line in (tmp_path / "benchmarks.jsonl").read_text().splitlines()]
    assert [x for x in after if x["workload"] != "import_time"] == [
        x for x in before if x["workload"] != "import_time"
    ]
    (line,) = (x for x in after if x["workload"] == "import_time")
    assert line["command"] == "python -m benchmarks run import_time --rounds 1"
    assert {"machine", "versions", "medians", "date"} <= set(line)
    assert (
        "`python -m benchmarks run import_time --rounds 1`"
        in (tmp_path / "benchmarks.md").read_text()
    )


def test_tables_of_the_docs_match_their_measurements(tmp_path):
    import shutil

    assets = ROOT / "docs" / "assets"
    for name in ("benchmarks.jsonl", "device.jsonl"):
        shutil.copy(assets / name, tmp_path)
    done = run("-m", "benchmarks", "report", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    texts = "benchmarks.md", "tries.md", "virtual.md", "growth.md", "device.md", "device_tries.md"
    for name in texts:
        assert (tmp_path / name).read_text() == (assets / name).read_text()
    for name in ("benchmarks.png", "device.png"):
        assert (tmp_path / name).stat().st_size > 5000


NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
for cell in notebook.cells:
    assert cell.cell_type != "code" or cell.execution_count, "not executed"
    for output in cell.get("outputs", []):
        assert output.get("name") != "stderr", output
        assert "site-packages" not in str(output), output
NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
print(len(notebook.cells))
"""


@pytest.mark.parametrize("name", ["exploring", "tries"])
def test_notebooks_are_executed_and_run_without_errors(name):
    done = run("-c", NOTEBOOK, str(ROOT / "docs" / "notebooks" / f"{name}.ipynb"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= 8


def test_the_documentation_builds_without_a_warning(tmp_path):
    done = run("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "tokens per second" in (tmp_path / "performance" / "index.html").read_text()


def test_particles_that_share_a_picture_compute_it_once():
    done = run("examples/picture_smc.py", "--particles", "8", "--characters", "5")
    assert done.returncode == 0, done.stderr
    texts = re.findall(r"^'([A-Z ]{5})'$", done.stdout, re.M)
    assert len(texts) == 5
    prompt, computed = map(int, re.findall(r"(\d+) (?:tokens|computed)", done.stdout))
    assert prompt < computed <= prompt + 8 * 4
    assert len(Path(ROOT / "examples/picture_smc.py").read_text().splitlines()) < 80
