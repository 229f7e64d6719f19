"""The policy is a pure function: every clause of it, and that nothing waits for ever."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.batching import BatchPolicy, BatchState, Decision

POLICY = BatchPolicy(max_batch_size=4, timeout=0.02, quiet_turns=3, max_turns=50)

states = st.builds(
    BatchState,
    num_pending=st.integers(0, 10),
    is_busy=st.booleans(),
    flush_requested=st.booleans(),
    num_turns=st.integers(0, 100),
    num_quiet_turns=st.integers(0, 100),
    waited=st.floats(0, 1),
)


def test_default_policy_and_state_have_the_documented_values():
    assert BatchPolicy() == BatchPolicy(
        max_batch_size=20, timeout=0.02, quiet_turns=4, max_turns=1000
    )
    assert BatchState(1) == BatchState(
        1, is_busy=False, flush_requested=False, num_turns=0, num_quiet_turns=0, waited=0.0
    )


def test_infinite_timeout_keeps_waiting():
    assert BatchPolicy(timeout=math.inf).decide(BatchState(1, waited=1e9)) is Decision.YIELD


@given(states)
def test_nothing_fires_while_busy_or_empty(state):
    decision = POLICY.decide(state)
    assert (decision is Decision.SLEEP) == (state.is_busy or state.num_pending == 0)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (BatchState(1), Decision.YIELD),
        (BatchState(3, num_turns=2, num_quiet_turns=2, waited=0.019), Decision.YIELD),
        (BatchState(4), Decision.FIRE),
        (BatchState(9), Decision.FIRE),
        (BatchState(1, flush_requested=True), Decision.FIRE),
        (BatchState(1, num_quiet_turns=3), Decision.FIRE),
        (BatchState(1, num_turns=50), Decision.FIRE),
        (BatchState(1, waited=0.02), Decision.FIRE),
    ],
)
def test_policy_fires_for_each_reason_alone(state, expected):
    assert POLICY.decide(state) is expected


@given(st.lists(st.booleans(), min_size=60, max_size=60), st.floats(0, 0.001))
def test_no_arrival_pattern_starves_the_first_query(arrivals, pass_seconds):
    quiet = 0
    for passes, is_arrival in enumerate(arrivals, 1):
        quiet = 0 if is_arrival else quiet + 1
        state = BatchState(1, num_turns=passes, num_quiet_turns=quiet, waited=passes * pass_seconds)
        if POLICY.decide(state) is Decision.FIRE:
            return
    pytest.fail("the first query never went")


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 0},
        {"max_batch_size": -3},
        {"timeout": -0.1},
        {"timeout": float("nan")},
        {"quiet_turns": 0},
        {"quiet_turns": 5, "max_turns": 4},
    ],
)
def test_impossible_bounds_are_refused(options):
    with pytest.raises(ValueError, match=rf"{list(options)[-1]} must be"):
        BatchPolicy(**options)


@pytest.mark.parametrize("size", [True, 2.0, "20"])
def test_batch_size_that_is_no_integer_raises_type_error(size):
    with pytest.raises(TypeError, match="batch_size"):
        BatchPolicy(max_batch_size=size)
