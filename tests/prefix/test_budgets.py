"""Bytes that keys, values and recurrent states may take, counted anew."""

import pytest
import torch

from genlm_backend.errors import OptionError
from genlm_backend.prefix import budgets
from genlm_backend.prefix.kv_pool import KVLayout, LayerLayout
from genlm_backend.prefix.state_cache import StateLayout, StateTensor
from genlm_backend.runtime import memory

GIB = 1 << 30
CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)


def layer(dim, device):
    """A layer with ``8 * dim`` bytes a token."""
    return LayerLayout(1, dim, 1, dim, torch.float32, device)


def state(size, device):
    """A recurrent state of ``4 * size`` bytes."""
    return StateTensor(0, "recurrent_states", 0, (size,), torch.float32, device)


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """Eight GiB that are free on the machine, and six on its CUDA device."""
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 80 * GIB))


@pytest.mark.parametrize(
    ("layers", "states", "expected"),
    [
        ([layer(4, CPU), layer(2, CPU)], [], 2 * GIB // 48 * 48),
        ([layer(4, CUDA), layer(2, CUDA)], [], 3 * GIB // 48 * 48),
        ([layer(4, CUDA), layer(4, CPU)], [], 2 * GIB // 32 * 64),
        ([layer(3, CUDA), layer(1, CPU)], [], 3 * GIB // 24 * 32),
        ([layer(4, CPU), layer(4, META), layer(1, META)], [], 2 * GIB // 40 * 72),
        ([layer(4, CPU)], [state(1000, CUDA)], 2 * GIB // 32 * 32),
        ([], [state(5, CPU), state(3, CPU)], 2 * GIB // 32 * 32),
        ([], [state(5, CPU), state(3, CUDA)], 2 * GIB // 20 * 32),
        ([], [state(3, CPU), state(7, CUDA)], 3 * GIB // 28 * 40),
    ],
)
def test_default_budget_is_set_by_the_device_with_the_least_room(layers, states, expected):
    layout = KVLayout(tuple(layers), StateLayout(tuple(states)))
    assert budgets.default_kv_budget(layout) == expected


def test_default_budget_of_host_memory_is_at_most_4_gib(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 100 * GIB)
    assert budgets.default_kv_budget(KVLayout((layer(4, CPU),))) == 4 * GIB


@pytest.mark.parametrize("kv", [None, 0, 1])
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("states", [None, 0, 1])
def test_zero_kv_budget_refuses_host_and_state_budgets(kv, host, states):
    if kv == 0 and (states or host):
        name = "state_cache_bytes=1" if states else "host_cache_bytes=1"
        with pytest.raises(OptionError, match=name):
            budgets.check_budgets(kv, host, states)
    else:
        budgets.check_budgets(kv, host, states)
    if not states and not (kv == 0 and host):
        budgets.check_budgets(kv, host)


@pytest.mark.parametrize(
    ("wanted", "budget", "size", "attends", "expected"),
    [
        (None, 101, 0, True, 0),
        (0, 101, 0, True, "needs a model with recurrent states"),
        (7, 101, 0, True, "needs a model with recurrent states"),
        (None, 101, 10, True, 50),
        (None, 101, 10, False, 101),
        (None, 20, 10, True, 10),
        (None, 10, 10, False, 10),
        (None, 19, 10, True, "but only 9 are available: raise kv_cache_bytes"),
        (None, 9, 10, False, "but only 9 are available: raise kv_cache_bytes"),
        (30, 101, 10, True, 30),
        (101, 101, 10, True, 101),
        (102, 101, 10, True, "more than kv_cache_bytes=101"),
        (10, 101, 10, True, 10),
        (9, 101, 10, True, "only 9 are available: raise state_cache_bytes"),
    ],
)
def test_state_budget_is_half_of_the_total_or_as_given(wanted, budget, size, attends, expected):
    if isinstance(expected, int):
        assert budgets.state_budget(wanted, budget, size, "tiny", attends=attends) == expected
        return
    with pytest.raises(OptionError, match=expected):
        budgets.state_budget(wanted, budget, size, "tiny", attends=attends)
