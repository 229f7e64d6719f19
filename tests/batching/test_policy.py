"""The policy is a pure function: every clause of it, and that nothing waits for ever."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.batching import BatchPolicy, BatchState, Decision

POLICY = BatchPolicy(max_batch_size=4, timeout=0.02, quiet_passes=3, max_passes=50)

states = st.builds(
    BatchState,
    num_pending=st.integers(0, 10),
    is_busy=st.booleans(),
    is_urgent=st.booleans(),
    num_passes=st.integers(0, 100),
    num_quiet_passes=st.integers(0, 100),
    waited=st.floats(0, 1),
)


def test_a_timeout_may_be_endless():
    assert BatchPolicy(timeout=math.inf).decide(BatchState(1, waited=1e9)) is Decision.YIELD


@given(states)
def test_nothing_fires_while_busy_or_empty(state):
    decision = POLICY.decide(state)
    assert (decision is Decision.SLEEP) == (state.is_busy or state.num_pending == 0)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (BatchState(1), Decision.YIELD),
        (BatchState(3, num_passes=2, num_quiet_passes=2, waited=0.019), Decision.YIELD),
        (BatchState(4), Decision.FIRE),
        (BatchState(9), Decision.FIRE),
        (BatchState(1, is_urgent=True), Decision.FIRE),
        (BatchState(1, num_quiet_passes=3), Decision.FIRE),
        (BatchState(1, num_passes=50), Decision.FIRE),
        (BatchState(1, waited=0.02), Decision.FIRE),
    ],
)
def test_each_reason_to_fire_alone(state, expected):
    assert POLICY.decide(state) is expected


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 0},
        {"max_batch_size": -3},
        {"timeout": -0.1},
        {"timeout": float("nan")},
        {"quiet_passes": 0},
        {"quiet_passes": 5, "max_passes": 4},
    ],
)
def test_impossible_bounds_are_refused(options):
    with pytest.raises(ValueError, match=r"must be"):
        BatchPolicy(**options)
