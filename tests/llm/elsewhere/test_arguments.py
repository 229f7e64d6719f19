"""What verbs are given crosses whole, however little of it is sent."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genlm_backend.errors import QueryDroppedError
from genlm_backend.llm import ProcessEvaluator, RowQuery
from genlm_backend.queries.context import ContextFactory
from genlm_backend.remote.channel import Channel
from tests.llm import toy
from tests.llm.elsewhere.over_there import Told

NUM_PLAIN = 80  # ids that ask nothing else of Told
MODELS = [ContextFactory(toy.VOCAB), ContextFactory(toy.VOCAB)]


@pytest.fixture
def evaluators():
    made = [ProcessEvaluator(Told), ProcessEvaluator(Told)]
    for evaluator in made:
        evaluator.open()
    yield made
    for evaluator in made:
        evaluator.close()


@pytest.fixture
def messages(monkeypatch):
    """The sizes of the messages that are sent."""
    sizes, send = [], Channel.send

    def counted(self, message, look):
        sizes.append(len(message))
        send(self, message, look)

    monkeypatch.setattr(Channel, "send", counted)
    return sizes


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask"] * 6 + ["both", "drop", "kill", "clear", "lose"]),
        st.integers(0, 1),
        st.lists(st.tuples(st.integers(0, 99), st.lists(st.integers(0, 79), max_size=3))),
    ),
    max_size=15,
)


def test_rows_of_a_process_equal_those_of_a_local_evaluator(evaluators):
    plain = Told()

    def check(evaluator, contexts):
        found = evaluator.evaluate([*map(RowQuery, contexts)])
        expected = plain.evaluate([*map(RowQuery, contexts)])
        for row, own in zip(found, expected, strict=True):
            assert torch.equal(row.logprobs, own.logprobs)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STEPS, st.sampled_from([1, 511, 512]))
    def histories(steps, size):
        known = [MODELS[0].of([i % NUM_PLAIN for i in range(size)])]
        for method, number, wanted in steps:
            evaluator = evaluators[number]
            contexts = [known[parent % len(known)] + more for parent, more in wanted]
            known += contexts
            if method == "ask":
                check(evaluator, contexts)
            elif method == "both":
                with ThreadPoolExecutor(2) as pool:
                    [*pool.map(check, evaluators, [contexts] * 2)]
            elif method == "drop":
                give_up(evaluator, [*contexts, known[0] + [90]])
            elif method == "kill":
                evaluator._child._process.kill()
                evaluator.restart()
            elif method == "clear":
                evaluator.clear()
            else:  # what never arrives
                evaluator._sender.packed(([*map(RowQuery, contexts)],))

    histories()


def give_up(evaluator, contexts):
    """Ask what takes long, and wait no more, be it read over there or not."""

    def unwanted():
        raise QueryDroppedError("by the test")

    wanted, evaluator.check_cancelled = evaluator.check_cancelled, unwanted
    try:
        with pytest.raises(QueryDroppedError):
            evaluator.evaluate([*map(RowQuery, contexts)])
    finally:
        evaluator.check_cancelled = wanted


PROMPT = [i % NUM_PLAIN for i in range(4096)]


@pytest.mark.parametrize("kind", ["contexts", "lists"])
def test_a_step_sends_a_shared_prefix_once(evaluators, messages, kind):
    model = MODELS[0]
    contexts = [model.of(PROMPT)] * 20
    evaluators[0].evaluate([RowQuery(contexts[0])])
    for step in range(5):
        contexts = [context.extend(i + step) for i, context in enumerate(contexts)]
        asked = [model.of(list(c)) for c in contexts] if kind == "lists" else contexts
        evaluators[0].evaluate([*map(RowQuery, asked)])
        assert messages[-1] <= 4 * 4096 + 20 * 256
