"""Who runs, against the rules in plain words; everybody is told in the end."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from genlm_backend.generation.engine.roster import Phase, Roster
from genlm_backend.generation.generated import GenerationStatus
from tests.generation.drafts import Draft, adapters, all_prefixes, need
from tests.generation.rules import Rules, Wanted

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=3)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=3)


class Histories(RuleBasedStateMachine):
    """A roster, the rules, and tasks that do what is decided, each at a moment of its own."""

    @initialize(
        max_batch=st.integers(1, 6),
        max_waiting=st.sampled_from([None, 0, 1, 3]),
        capacity=st.sampled_from([12, 30, 40, 60]),
        keeps_contexts=st.booleans(),
    )
    def begin(self, max_batch, max_waiting, capacity, keeps_contexts):
        self.roster = Roster(max_batch, max_waiting, capacity, keeps_contexts)
        self.roster.is_open = True
        self.plain = Rules(max_batch, max_waiting, capacity)
        self.keeps_contexts = keeps_contexts
        self.num_submitted = 0
        self.of_text = {}  # the rules' text of each of the roster's
        self.settled = {}
        self.expected = {}
        self.started, self.resting, self.cancelled = set(), set(), set()
        self.at_work = []  # texts whose tasks have begun and not left
        self.asked = {}  # the contexts that each of them asked for last
        self.reading = set()  # those that have asked and not written
        self.memory = set()

    # ---------------------------------------------------------------- what the tasks do

    def carry_out(self, decision):
        if decision is None:
            return
        lists = [decision.start, decision.resume, decision.preempt, decision.cancel]
        assert max(Counter(text for texts in lists for text in texts).values(), default=0) <= 1
        for text in decision.start:
            assert text not in self.started
            self.started.add(text)
            self.at_work.append(text)
        for text in decision.preempt:
            assert text in self.started
            assert text not in self.resting
            self.resting.add(text)
        for text in decision.resume:
            self.resting.remove(text)
        for text in decision.cancel:
            assert text in self.started
            assert text not in self.cancelled
            self.cancelled.add(text)
        for settlement in decision.settle:
            assert settlement.request not in self.settled
            self.settled[settlement.request] = settlement.status
            assert all(not text.is_wanted for text in settlement.entries)

    def of(self, *phases):
        return [text for text in self.at_work if text.phase in phases]

    def may_ask(self):
        """Texts whose tasks go on: one that has just begun asks before it rests."""
        return [
            text
            for text in self.of(Phase.RUNNING, Phase.PREEMPTED)
            if text not in self.reading and (text not in self.resting or text not in self.asked)
        ]

    def may_write(self):
        return [text for text in self.of(Phase.RUNNING, Phase.PREEMPTED) if text in self.reading]

    def ask_for(self, text):
        self.roster.asks(text)
        self.reading.add(text)
        self.asked[text] = [list(context) for context in text.draft.contexts]
        namespace = text.draft.lora_name
        self.memory |= {(namespace, prefix) for prefix in all_prefixes(text.draft.contexts)}

    def forget(self, text):
        namespace = text.draft.lora_name
        for context in self.roster.left_behind(text):
            keep = self.roster.num_needed(context, namespace)
            for end in range(len(context), keep, -1):
                prefix = tuple(context[:end])
                longer = any(n == namespace and p[:end] == prefix != p for n, p in self.memory)
                if longer:
                    break  # it is the beginning of what stays
                self.memory.discard((namespace, prefix))

    # ---------------------------------------------------------------- what happens

    @precondition(lambda self: self.roster.is_open)
    @rule(
        found=st.lists(
            st.lists(st.tuples(prompts, st.integers(1, 3), adapters), min_size=1, max_size=3),
            min_size=1,
            max_size=2,
        ),
        is_endless=st.integers(0, 12),
    )
    def submit(self, found, is_endless):
        requests = {}
        for number, drafts in enumerate(found):
            request = 10 * self.num_submitted + number
            requests[request] = [
                Draft(
                    [(context * 99)[:100] if is_endless == 12 else list(context)], lora_name, width
                )
                for context, width, lora_name in drafts
                if width <= self.roster.max_batch
            ] or [Draft([[0]])]
        self.num_submitted += 1
        texts = [Wanted(r, draft) for r, drafts in requests.items() for draft in drafts]
        has_room = self.plain.submit(texts)
        before = self.roster.entries
        decision = self.roster.submit(requests)
        assert (decision is not None) == has_room
        if decision is None:
            assert self.roster.entries == before
            return
        self.carry_out(decision)
        by_draft = {text.draft: text for text in texts}
        roster_texts = [*self.roster.entries, *(t for s in decision.settle for t in s.entries)]
        for text in roster_texts:
            if text.draft in by_draft:
                self.of_text[text] = by_draft[text.draft]
        self.expected.update(dict.fromkeys(requests))
        self.plain.settle()

    @precondition(lambda self: self.may_ask())
    @rule(data=st.data())
    def ask(self, data):
        self.ask_for(data.draw(st.sampled_from(self.may_ask())))

    @precondition(lambda self: self.may_ask() or self.may_write())
    @rule(data=st.data(), is_own=st.booleans(), num_steps=st.sampled_from([1, 2, 12, 25]))
    def write(self, data, is_own, num_steps):
        """A task writes some steps, and no further than one where it is to rest."""
        text = data.draw(st.sampled_from([*self.may_ask(), *self.may_write()]))
        token = text.request if is_own else 0
        if text not in self.reading:
            self.ask_for(text)
        for _ in range(num_steps):
            self.write_one(text, token)
            if text not in self.may_ask():
                break
            self.ask_for(text)

    def write_one(self, text, token):
        self.reading.remove(text)
        text.draft.grow(token)
        decision = self.roster.grew(text)
        self.carry_out(decision)
        if decision is not None:
            self.plain.settle()
        self.forget(text)

    @precondition(lambda self: self.may_write())
    @rule(data=st.data())
    def finish(self, data):
        text = data.draw(st.sampled_from(self.may_write()))
        text.draft.grow(0)  # the end of it, which nobody asks for
        self.finish_with(text)

    def finish_with(self, text):
        self.reading.discard(text)
        self.resting.discard(text)
        self.roster.finished(text)
        mine = self.of_text[text]
        mine.is_complete, mine.is_running = True, False

    @precondition(lambda self: self.of(Phase.LEAVING))
    @rule(data=st.data())
    def leave(self, data):
        self.leave_with(data.draw(st.sampled_from(self.of(Phase.LEAVING))))

    def leave_with(self, text):
        self.roster.noticed(text)
        self.forget(text)
        is_taken_off = text.phase is Phase.GONE
        decision = self.roster.left(text)
        self.at_work.remove(text)
        if is_taken_off:
            assert decision is None
            return
        mine = self.of_text[text]
        self.plain.texts.remove(mine)
        is_last = all(t.request != text.request for t in self.plain.texts)
        self.carry_out(decision)
        assert (self.settled.get(text.request) is GenerationStatus.FINISHED) == is_last
        if is_last:
            self.expected[text.request] = GenerationStatus.FINISHED
        self.plain.settle()

    @precondition(lambda self: self.of(Phase.CANCELLED, Phase.GONE))
    @rule(data=st.data())
    def notice(self, data):
        """A task sees that its request has ended."""
        self.notice_with(data.draw(st.sampled_from(self.of(Phase.CANCELLED, Phase.GONE))))

    def notice_with(self, text):
        self.roster.noticed(text)
        assert text.phase is Phase.GONE
        self.forget(text)
        assert self.roster.left(text) is None
        self.at_work.remove(text)

    @precondition(lambda self: self.expected and self.num_submitted > 3)
    @rule(
        data=st.data(),
        status=st.sampled_from([GenerationStatus.INTERRUPTED, GenerationStatus.FAILED]),
    )
    def end(self, data, status):
        request = data.draw(st.sampled_from(sorted(self.expected)))
        is_open = any(t.request == request and not t.is_complete for t in self.plain.texts)
        error = ValueError() if status is GenerationStatus.FAILED else None
        decision = self.roster.ended(request, status, error)
        assert (decision is not None) == is_open
        self.carry_out(decision)
        if is_open:
            assert decision.settle[0].error is error
            self.expected[request] = status
            self.plain.take_off(request)
            self.plain.settle()

    @precondition(lambda self: self.num_submitted > 8)
    @rule()
    def close(self):
        """Stopping interrupts everybody who is not about to finish, and gives nobody a place."""
        decision = self.roster.close()
        assert decision.start == decision.resume == decision.preempt == []
        self.carry_out(decision)
        for request in {t.request for t in self.plain.texts if not t.is_complete}:
            self.expected[request] = GenerationStatus.INTERRUPTED
            self.plain.take_off(request)
        assert not self.roster.is_open

    @precondition(lambda self: not self.roster.is_open)
    @rule()
    def open(self):
        self.roster.is_open = True

    # ---------------------------------------------------------------- what holds

    @invariant()
    def everybody_is_where_the_rules_have_them(self):
        roster = self.roster
        for request in self.plain.hopeless:
            self.expected[request] = GenerationStatus.INTERRUPTED
        assert self.settled == {r: status for r, status in self.expected.items() if status}
        mine = {text: self.of_text[text] for text in roster.entries}
        gone = {text for text in mine if text.phase is Phase.GONE}
        assert [mine[text] for text in roster.entries if text not in gone] == self.plain.texts
        for text in mine.keys() - gone:
            rule_text = mine[text]
            expected = Phase.LEAVING if rule_text.is_complete else None
            if expected is None and rule_text.is_running:
                expected = Phase.RUNNING
            elif expected is None:
                expected = Phase.PREEMPTED if rule_text.has_begun else Phase.WAITING
            assert text.phase is expected
            assert (text in self.resting) == (text.phase is Phase.PREEMPTED)
        running = [text.draft for text in roster.entries if text.phase is Phase.RUNNING]
        assert roster.num_running == len(running)
        assert sum(draft.width for draft in running) <= roster.max_batch
        assert need(running) <= roster.capacity
        assert roster.num_waiting_submissions == len(self.plain.waiting())
        wanted = [text for text in roster.entries if text.is_wanted]
        if wanted and not self.of(Phase.LEAVING):  # the oldest goes on
            assert wanted[0].phase is Phase.RUNNING

    @invariant()
    def what_is_needed_is_in_memory(self):
        for text in self.at_work:
            if text.is_wanted:
                asked = self.asked.get(text, [])
                prefixes = all_prefixes(asked) & all_prefixes(text.draft.contexts)
                assert {(text.draft.lora_name, prefix) for prefix in prefixes} <= self.memory

    def teardown(self):
        """Nobody is lost: whoever is there comes to an end, and nothing stays in memory."""
        if not hasattr(self, "roster"):
            return
        while self.at_work or self.roster.entries:
            for text in self.of(Phase.RUNNING):
                self.finish_with(text)
            for text in self.of(Phase.CANCELLED, Phase.GONE):
                self.notice_with(text)
            for text in self.of(Phase.LEAVING):
                self.leave_with(text)
            self.everybody_is_where_the_rules_have_them()
        assert self.settled.keys() == self.expected.keys()
        assert all(status is not None for status in self.settled.values())
        assert self.keeps_contexts or not self.memory


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestHistories = Histories.TestCase


@pytest.mark.parametrize("max_batch", [1, 3])
def test_thousands_that_can_never_fit_are_all_told_at_once(max_batch):
    roster = Roster(max_batch, None, 40)
    roster.is_open = True
    first = roster.submit({0: [Draft([[1, 2]], width=max_batch)]})
    for i in range(1, 5000):
        decision = roster.submit({i: [Draft([[i] * 41])]})
        assert not decision.settle
    assert roster.num_waiting_submissions == 4999
    decision = roster.ended(0, GenerationStatus.INTERRUPTED)
    assert decision.cancel == first.start
    assert [settlement.request for settlement in decision.settle] == list(range(5000))
    assert roster.entries == []
