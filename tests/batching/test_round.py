"""A round against a model in plain words: whoever asks is answered once, and nobody else is."""

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from genlm_backend.batching.round import Round, Several, is_waiting, leave

loops = st.integers(0, 1)


class Rounds(RuleBasedStateMachine):
    """A queue, at most one batch that was cut off it, and what is known of both."""

    def __init__(self):
        super().__init__()
        self.loops = [asyncio.new_event_loop() for _ in range(2)]
        self.queue: Round = Round(0)
        self.batch: Any = None
        self.waiting, self.begun = {}, {}  # number → callers that have not left
        self.weights, self.queries, self.next = {}, {}, 0
        self.expected = {}  # caller of many → its numbers
        self.answered = []

    def teardown(self):
        for loop in self.loops:
            loop.close()

    def _caller(self, loop):
        return self.loops[loop].create_future()

    def _add(self, caller, loop, weight=1.0):
        self.queue.loops.add(loop)
        number = self.queue.add(f"key {self.next}", f"query {self.next}", weight, caller)
        assert number == self.next
        self.next += 1
        self.waiting[number] = {caller: None}
        self.weights[number] = weight
        return number

    @rule(loop=loops, weight=st.sampled_from([1.0, 1.0, 1.0, 0.25, 3.0]))
    def ask(self, loop, weight):
        self._add(self._caller(loop), self.loops[loop], weight)

    @rule(loop=st.none() | loops, count=st.integers(1, 4), joins=st.booleans())
    def ask_several(self, loop, count, joins):
        home = None if loop is None else self.loops[loop]
        caller = Several(home)
        numbers = [self._add(caller, home) for _ in range(count)]
        for known, own in ((self.queue, self.waiting), (self.batch, self.begun)):
            if joins and own:
                number = max(own)
                known.loops.add(home)
                known.join(number, caller)
                own[number][caller] = None
                numbers.append(number)
        caller.wait_for(numbers)
        self.expected[caller] = numbers

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), loop=loops)
    def join(self, data, loop):
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        caller = self._caller(loop)
        self.queue.loops.add(self.loops[loop])
        self.queue.join(number, caller)
        self.waiting[number][caller] = None

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), loop=loops)
    def join_begun(self, data, loop):
        number = data.draw(st.sampled_from(sorted(self.begun)))
        caller = self._caller(loop)
        self.batch.loops.add(self.loops[loop])
        self.batch.join(number, caller)
        self.begun[number][caller] = None

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), says_so=st.booleans())
    def go(self, data, says_so):
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        caller = data.draw(st.sampled_from(list(self.waiting[number])))
        if says_so:
            for own in [n for n, callers in self.waiting.items() if caller in callers]:
                is_last = self.queue.leave(own, caller)
                assert not is_last or len(self.waiting[own]) == 1
            for own in [n for n, callers in self.begun.items() if caller in callers]:
                self.batch.leave(own, caller)
        else:
            leave(caller.future if isinstance(caller, Several) else caller)
        self._forget(caller)

    @rule()
    def all_go(self):
        """Nobody waits any more: the queue begins anew behind its last number."""
        for caller in {caller: None for callers in self.waiting.values() for caller in callers}:
            leave(caller.future if isinstance(caller, Several) else caller)
            self._forget(caller)
        self.queue = Round(self.queue.stop)

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def cancel_begun(self, data):
        number = data.draw(st.sampled_from(sorted(self.begun)))
        if self.begun[number]:
            caller = data.draw(st.sampled_from(list(self.begun[number])))
            (caller.future if isinstance(caller, Several) else caller).cancel()
            self._forget(caller)

    def _forget(self, caller):
        self.expected.pop(caller, None)
        for number in [n for n, callers in self.waiting.items() if caller in callers]:
            del self.waiting[number][caller]
            if not self.waiting[number]:
                del self.waiting[number]
        for callers in self.begun.values():
            callers.pop(caller, None)

    @precondition(lambda self: self.batch is None)
    @rule(most=st.integers(1, 5), num_shared=st.sampled_from([None, 1, 2, 4]))
    def cut(self, most, num_shared):
        def number_of(query):
            return int(query.removeprefix("query "))

        def shared(query):
            return number_of(query) % num_shared

        present = [
            number
            for number, callers in enumerate(self.queue.callers, self.queue.first)
            if callers is not None  # where they have gone without a word, that is not known yet
        ]
        while gone := self.queue.gone(
            size := self.queue.size(most, None if num_shared is None else shared)
        ):
            for number in gone:
                assert number not in self.waiting
                assert self.queue.forget(number) == f"key {number}"
        self.batch = self.queue.cut(size)
        numbers = [self.batch.first + index for index in self.batch.evaluated]
        taken, total, counted = [], 0.0, set()
        for number in present:
            own = number if num_shared is None else number % num_shared
            weight = 0.0 if own in counted else self.weights[number]
            if taken and own not in counted and total + weight > most:
                break
            if number in self.waiting:
                taken.append(number)
                counted.add(own)
                total += weight
        assert numbers == taken
        assert [self.batch.queries[i] for i in self.batch.evaluated] == [
            f"query {number}" for number in taken
        ]
        self.begun = {number: self.waiting.pop(number) for number in taken}

    @precondition(lambda self: self.batch is not None)
    @rule()
    def give_up(self):
        self.queue.put_back(self.batch)
        self.waiting.update({n: callers for n, callers in self.begun.items() if callers})
        self.batch, self.begun = None, {}

    @precondition(lambda self: self.batch is not None)
    @rule(fails=st.booleans())
    def answer(self, fails):
        error = ArithmeticError()
        results = [f"result {self.batch.first + index}" for index in self.batch.evaluated]
        if fails:
            answers = self.batch.refused(error)
        else:
            answers = self.batch.answered(results)
        given = {}
        for loop, futures, own in answers:
            for future, result in zip(futures, own, strict=True):
                assert future not in given
                given[future] = loop, result
        for number, callers in self.begun.items():
            for caller in list(callers):
                if isinstance(caller, Several):
                    if caller not in self.expected:
                        continue
                    whole = all(
                        n in self.begun or n in self.answered for n in self.expected[caller]
                    )
                    if fails or whole:
                        loop, result = given[caller.future]
                        assert loop is caller.loop
                        assert result == (
                            error if fails else [f"result {n}" for n in self.expected[caller]]
                        )
                        assert caller.is_settled
                        del self.expected[caller]
                        for own in [n for n, others in self.waiting.items() if caller in others]:
                            del self.waiting[own][caller]
                            if not self.waiting[own]:
                                del self.waiting[own]
                    else:
                        assert caller.future not in given
                else:
                    result = error if fails else f"result {number}"
                    assert given[caller] == (caller.get_loop(), result)
        self.answered += [] if fails else list(self.begun)
        assert not any(self.batch.callers)
        self.batch, self.begun = None, {}

    @invariant()
    def whoever_waits_is_there(self):
        found = {
            number
            for number, callers in enumerate(self.queue.callers, self.queue.first)
            if is_waiting(callers)
        }
        assert found == set(self.waiting)
        assert len(self.queue) == sum(callers is not None for callers in self.queue.callers)
        assert self.queue.stop == self.next
        if self.batch is not None:
            assert self.batch.is_wanted() == any(self.begun.values())


def test_histories():
    run_state_machine_as_test(
        Rounds, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize("line", ["keys", "queries"])
@pytest.mark.parametrize("comes_alone", [True, False])
def test_a_query_that_an_interrupt_left_half_there_gives_way_to_the_next(line, comes_alone):
    loop = asyncio.new_event_loop()
    queue, futures = Round(5), [loop.create_future() for _ in range(2)]
    assert queue.add("a", 1, 1.0, futures[0]) == 5
    queue.keys.append("b")
    if line == "queries":
        queue.queries.append(2)
    if comes_alone:
        assert queue.add("c", 3, 1.0, futures[1]) == 6
    else:
        assert queue.add_all(["c"], [3], futures[1]) == range(6, 7)
    assert (queue.keys, queue.queries, queue.callers) == (["a", "c"], [1, 3], futures)
    loop.close()
