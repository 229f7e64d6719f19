"""Whatever computes on a device is there, and the processor waits for it once a pass."""

import functools
import json
import subprocess
import sys

import pytest
from torch.utils import backend_registration

from tests.llm import families
from tests.llm.hf.test_families import GATHERED

HAS_DEVICE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

NAMES = [
    *families.PER_TOKEN,
    "rows on the processor",
    "kept as bfloat16",
    "kept as int8",
    "kept as uint4",
    "host tier",
    "in bfloat16",
    "particles",
    "tries",
]


@functools.cache
def lines():
    """Return what a process has found that has such a device."""
    command = [sys.executable, "-m", "tests.llm.hf.on_pretend_device"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in found}


@pytest.mark.skipif(not HAS_DEVICE, reason="needs a torch that lets Python make a device")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_rows_on_pretend_device_are_right_with_few_waits(name):
    line = lines()[name]
    assert "error" not in line, line["error"]
    assert line["difference"] < (0.25 if name == "in bfloat16" else 2e-5)
    if name in ("particles", "tries"):
        assert line["num_waits"] == (name == "particles")
        return
    assert line["num_slots"], "nothing is kept"
    is_gathered = name in GATHERED
    assert line["attends"] == ("GatherAttention" if is_gathered else "CascadeAttention")
    assert bool(line["num_from_host"]) == (name == "host tier")
    # For the normalisers; beside these, for rows that are wanted on the processor, where keys and
    # values are moved, in the code of three models, where two lengths take a pass each, and for
    # masks of which a model has a part there.
    most = {
        "rows on the processor": 2,
        "host tier": 9,
        "deepseek-v3": 2,
        "gpt2": 2,
        "gemma4-shared": 2,
        "llama4-tuned": 3,
    }
    assert line["num_waits"] <= most.get(name, 1)


@pytest.mark.skipif(not HAS_DEVICE, reason="needs a torch that lets Python make a device")
@pytest.mark.timeout(300)
def test_first_operator_supporting_dtype_is_used():
    flash, efficient = lines()["in bfloat16"]["ops"]
    assert flash > 20
    assert not efficient
    flash, efficient = lines()["llama"]["ops"]
    assert flash == 1, "it was tried, and refused float32"
    assert efficient > 20
    assert lines()["bloom"]["ops"] == [0, 0], "whose past is copied"
