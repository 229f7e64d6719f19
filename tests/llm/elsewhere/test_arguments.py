"""What verbs are given crosses whole, however little of it is sent."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from genlm_backend.errors import QueryDroppedError
from genlm_backend.llm import ProcessEvaluator, Query
from genlm_backend.model.context import Context, Contexts
from genlm_backend.model.drawing import Drawing
from genlm_backend.model.query import Adapter
from genlm_backend.model.scoring import Scoring
from genlm_backend.remote import arguments
from genlm_backend.remote.arguments import Receiver, Sender
from genlm_backend.remote.channel import Channel
from genlm_backend.remote.messages import NotKnown
from genlm_backend.vision.pictures import Pictures
from tests.llm import toy
from tests.llm.elsewhere.over_there import Told

NUM_PLAIN = 80  # ids that ask nothing else of Told
MODELS = [Contexts(toy.VOCAB), Contexts(toy.VOCAB)]
ADAPTERS = [None, Adapter("one", 1), Adapter("two", 2)]


def picture(number):
    ids = [-5 - number, -6 - number, 7]
    return Pictures.of(ids, {"pixel_values": torch.full((2, 3), float(number))}, 2, 3)


PICTURES = [picture(0), picture(1)]


class Unsendable:
    def __reduce__(self):
        raise TypeError("by the test")


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


class Reply:
    def __init__(self, value):
        self.value = value


def crossed(question):
    """The same question by plain pickle, in values."""
    return told(pickle.loads(pickle.dumps(question)))


def told(question):
    context = question.text.context if isinstance(question, Scoring) else question.context
    pictures = None if context.pictures is None else context.pictures.key
    rest = [getattr(question, name, None) for name in ("start", "temperature", "uniform")]
    return type(question), question.adapter, context.packed().tolist(), pictures, rest


# ---------------------------------------------------------------- both ends, without a process


class Ends(RuleBasedStateMachine):
    """Whatever is asked arrives as plain pickle would have it."""

    contexts = Bundle("contexts")

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(arguments, "MAX_CONTEXT_BYTES", 9_000)
        self.patch.setattr(arguments, "MAX_PICTURE_BYTES", 60)
        self.patch.setattr(arguments, "_LAST_NUMBER", 40)
        self.sender, self.receiver, self.has_lost = Sender(), Receiver(), False

    def teardown(self):
        self.patch.undo()

    @initialize(target=contexts, size=st.sampled_from([1, 2, 509, 511, 512, 1023]))
    def begin(self, size):
        prompt = [i % NUM_PLAIN for i in range(size)]
        root = [
            Context.of(MODELS[0], pictures.token_ids, pictures=pictures) for pictures in PICTURES
        ]
        return multiple(MODELS[0].of(prompt), MODELS[1].of(prompt), *root)

    @rule(target=contexts, context=contexts, more=st.lists(st.integers(0, 2), max_size=40))
    def extend(self, context, more):
        return context + more

    @rule(target=contexts, context=contexts, token_id=st.integers(0, 2))
    def extend_by_one(self, context, token_id):
        return context.extend(token_id)

    @rule(target=contexts, context=contexts, count=st.integers(1, 600))
    def cut(self, context, count):
        if context.pictures is not None:
            count = max(2, count)
        return context[:count]

    @rule(target=contexts, context=contexts, model=st.sampled_from(MODELS))
    def copy(self, context, model):
        return context if context.pictures is not None else model.of(list(context))

    @rule(
        asked=st.lists(
            st.tuples(contexts, st.sampled_from(ADAPTERS), st.integers(0, 2)), max_size=9
        )
    )
    def ask(self, asked):
        questions = []
        for context, adapter, kind in asked:
            query = Query(context, adapter)
            is_long = len(context) > 1
            made = [query, Drawing(query, 0.5, 0.25), Scoring(query, 1) if is_long else query]
            questions.append(made[kind])
        (found,) = self.sender.asked("evaluate", (questions,), self.answer).value
        assert [*map(told, found)] == [*map(crossed, questions)]
        for question in found:
            self.note(question)

    def answer(self, packed):
        found = self.receiver.arguments(packed)
        return Reply(NotKnown() if found is None else found)

    def note(self, question):
        """Write down where a context has been found, as evaluators do."""
        if isinstance(question, Query):
            ids = question.context.packed().tobytes()
            _, place = question.context.place
            assert place == 0 or ids.startswith(place)
            question.context.place = (self, ids)

    @rule()
    def restart(self):
        self.receiver = Receiver()

    @rule()
    def clear(self):
        self.sender.asked("clear", (), self.answer)
        assert not self.receiver._known

    @rule(contexts=st.lists(contexts, min_size=1, max_size=3))
    def lose(self, contexts):
        self.has_lost = True  # what was to be dropped too
        self.sender.packed(([*map(Query, contexts)],))

    @rule(contexts=st.lists(contexts, min_size=1, max_size=3))
    def fail_here(self, contexts):
        with pytest.raises(TypeError, match="by the test"):
            self.sender.packed(([*map(Query, contexts)], Unsendable()))

    @rule(contexts=st.lists(contexts, min_size=1, max_size=3))
    def fail_there(self, contexts):
        given = ([*map(Query, contexts)], Unreadable())
        with pytest.raises(ValueError, match="no number"):
            self.sender.asked("evaluate", given, self.answer)

    @rule(contexts=st.lists(contexts, min_size=1, max_size=3))
    def somebody_else_asks(self, contexts):
        (found,) = self.receiver.arguments(Sender().packed(([*map(Query, contexts)],)))
        assert [*map(told, found)] == [crossed(Query(context)) for context in contexts]

    @invariant()
    def little_is_kept(self):
        kept = self.receiver._known.values()
        contexts = [value for value in kept if isinstance(value, Context)]
        size = sum(4 * len(context) + 512 for context in contexts)
        assert len(contexts) <= 1 or size <= 9_000 or self.has_lost
        num_pictures = len(kept) - len(contexts)
        assert num_pictures <= 1 or self.has_lost


TestEnds = Ends.TestCase
TestEnds.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("size", [1, 510, 511, 512, 513, 1023, 1024])
def test_what_extends_a_known_context_arrives_whole(size):
    sender, receiver = Sender(), Receiver()
    known = MODELS[0].of([i % NUM_PLAIN for i in range(size)])
    receiver.arguments(sender.packed((known,)))
    for num_new in (1, 2, 32, 33, 600):
        extended = known + [7] * num_new
        assert receiver.arguments(sender.packed((extended, known))) == (
            pickle.loads(pickle.dumps(extended)),
            pickle.loads(pickle.dumps(known)),
        )


def test_what_is_kept_is_what_was_used_last():
    sender, receiver = Sender(), Receiver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "MAX_CONTEXT_BYTES", 10 * (512 + 12))
        sender.forget()
        prompt = MODELS[0].of([1, 2])
        for token_id in range(50):
            receiver.arguments(sender.packed((prompt.extend(token_id),)))
            receiver.arguments(sender.packed((prompt,)))
        assert len(receiver._known) == 10
        assert prompt in receiver._known.values()


# ---------------------------------------------------------------- a process


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


def test_rows_are_those_of_an_evaluator_here(evaluators, monkeypatch):
    monkeypatch.setattr(arguments, "MAX_CONTEXT_BYTES", 9_000)
    plain = Told()

    def check(evaluator, contexts):
        found = evaluator.evaluate([*map(Query, contexts)])
        expected = plain.evaluate([*map(Query, contexts)])
        for row, own in zip(found, expected, strict=True):
            assert torch.equal(row.logprobs, own.logprobs)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(STEPS, st.sampled_from([1, 511, 512]))
    def histories(steps, size):
        known = [MODELS[0].of([i % NUM_PLAIN for i in range(size)])]
        for verb, number, wanted in steps:
            evaluator = evaluators[number]
            contexts = [known[parent % len(known)] + more for parent, more in wanted]
            known += contexts
            if verb == "ask":
                check(evaluator, contexts)
            elif verb == "both":
                with ThreadPoolExecutor(2) as pool:
                    [*pool.map(check, evaluators, [contexts] * 2)]
            elif verb == "drop":
                give_up(evaluator, [*contexts, known[0] + [90]])
            elif verb == "kill":
                evaluator._child._process.kill()
                evaluator.restart()
            elif verb == "clear":
                evaluator.clear()
            else:  # what never arrives
                evaluator._sender.packed(([*map(Query, contexts)],))

    histories()


def give_up(evaluator, contexts):
    """Ask what takes long, and wait no more, be it read over there or not."""

    def unwanted():
        raise QueryDroppedError("by the test")

    wanted, evaluator.check_wanted = evaluator.check_wanted, unwanted
    try:
        with pytest.raises(QueryDroppedError):
            evaluator.evaluate([*map(Query, contexts)])
    finally:
        evaluator.check_wanted = wanted


PROMPT = [i % NUM_PLAIN for i in range(4096)]


@pytest.mark.parametrize("kind", ["contexts", "lists"])
def test_a_step_sends_what_is_new(evaluators, messages, kind):
    model = MODELS[0]
    contexts = [model.of(PROMPT)] * 20
    evaluators[0].evaluate([Query(contexts[0])])
    assert messages[-1] > 4 * 4096
    for step in range(5):
        contexts = [context.extend(i + step) for i, context in enumerate(contexts)]
        asked = [model.of(list(c)) for c in contexts] if kind == "lists" else contexts
        evaluators[0].evaluate([*map(Query, asked)])
        assert messages[-1] <= 20 * 64
    more = [1, 2, 3, 4]
    contexts = [context.extend(i) + more for i, context in enumerate(contexts)]
    evaluators[0].evaluate([*map(Query, contexts)])
    assert messages[-1] <= 20 * (64 + 4 * 4)
    evaluators[1].evaluate([*map(Query, contexts)])
    assert messages[-1] > 4 * 4096
    evaluators[0]._child._process.kill()
    evaluators[0].restart()
    (row,) = evaluators[0].evaluate([Query(contexts[0].extend(5))])
    (own,) = Told().evaluate([Query(contexts[0].extend(5))])
    assert torch.equal(row.logprobs, own.logprobs)
    assert messages[-1] > 4 * 4096


def test_a_step_behind_pictures_sends_what_is_new():
    sender = Sender()
    root = Context.of(MODELS[0], PICTURES[0].token_ids, pictures=PICTURES[0]) + PROMPT
    sender.packed(([Query(root)],))
    asked = [Query(root.extend(i)) for i in range(20)]
    assert len(sender.packed((asked,))) <= 20 * 64
