"""The far end, which processes and actors carry, without either."""

import functools
import pickle

import numpy as np
import pytest
import torch

from genlm_backend.errors import (
    EngineDiedError,
    EvaluationError,
    ModelStateError,
    QueryDroppedError,
)
from genlm_backend.llm import Query, Row, StatelessEvaluator
from genlm_backend.model.row import put_rows
from genlm_backend.remote.arguments import Sender
from genlm_backend.remote.far_end import FarEnd
from genlm_backend.remote.messages import Answers, InTable, PackedError, Request

WIDTH = 7
CLOSED = []  # kinds of evaluators, in this order


class Simple(StatelessEvaluator):
    """A row of the last token; what cannot be one, on demand."""

    def __init__(self, kind="simple"):
        super().__init__(WIDTH)
        self.kind = kind
        if kind == "does not open":
            self.info, self.open = None, self.fail

    def fail(self):
        raise KeyError("by the test")

    def close(self):
        CLOSED.append(self.kind)

    def evaluate(self, queries):
        if self.kind == "exits":
            raise SystemExit(3)
        if self.kind == "asks":
            self.check_wanted()
        return [self.answer(query.token_ids[-1]) for query in queries]

    def answer(self, last):
        if last == 0:
            return KeyError("by the test")
        return Row(torch.full((WIDTH + (last == 1),), float(last)), last / 2)


class Asker:
    """The near end, and a carrier that takes two rows at once."""

    def __init__(self, *told):
        self.end, self.sender, self.number = FarEnd(self.carry, *told), Sender(), 0

    def carry(self, rows):
        table = np.empty((len(rows[:2]), len(rows[0].logprobs)), np.float32)
        put_rows(rows[:2], table)
        return table, rows[2:]

    def ask(self, verb, *arguments):
        self.number += 1
        return self.end.reply(Request(self.number, verb, self.sender.packed(arguments)))

    def open(self, kind="simple", *version):
        return self.ask("open", pickle.dumps(functools.partial(Simple, kind)), *version)


def test_rows_go_by_the_carrier_as_many_as_it_takes_and_all_else_by_the_reply():
    asker = Asker()
    opened = asker.open()
    assert (opened.number, opened.value.vocab_size, opened.error, opened.table) == (
        1, WIDTH, None, None,
    )  # fmt: skip
    reply = asker.ask("evaluate", [Query([i]) for i in (5, 0, 3, 1, 2)])
    assert isinstance(reply.value, Answers)
    assert reply.value.width == WIDTH
    first, error, second, other, third = reply.value.answers
    assert [first, second, third] == [InTable(2.5), InTable(1.5), InTable(1.0)]
    assert isinstance(error, PackedError)
    assert isinstance(error.error(), KeyError)
    assert other.logprobs.tolist() == [1.0] * (WIDTH + 1)  # of another width, for them to refuse
    tables = [reply.table, asker.ask("more").table]
    assert np.concatenate(tables).tolist() == [[float(last)] * WIDTH for last in (5, 3, 2)]
    assert asker.ask("more").table is None
    assert asker.ask("num_cached", Query([1])).table is None


def test_what_is_asked_before_it_is_opened_has_died():
    asker = Asker()
    for verb in ("evaluate", "more", "close"):
        reply = asker.ask(verb)
        assert isinstance(reply.error.error(), EngineDiedError)
        assert (reply.value, reply.counts, reply.table) == (None, None, None)


def test_what_cannot_be_made_is_told_and_nothing_is_there():
    asker = Asker()
    assert isinstance(asker.ask("open", b"nothing").error.error(), EvaluationError)
    made = asker.ask("open", pickle.dumps(dict)).error.error()
    assert "must return an Evaluator, got <class 'dict'>" in str(made)
    with pytest.raises(ModelStateError, match=r"where the replica is, and 0\.0\.1 here"):
        raise asker.open("simple", "0.0.1").error.error()
    assert isinstance(asker.ask("evaluate", []).error.error(), EngineDiedError)


def test_an_evaluator_that_does_not_open_is_closed_like_any_other():
    del CLOSED[:]
    asker = Asker()
    assert isinstance(asker.open("does not open").error.error(), KeyError)
    assert asker.open().error is None
    assert CLOSED == ["does not open"]
    assert asker.ask("close").error is None
    assert CLOSED == ["does not open", "simple"]


def test_nobody_waits_for_a_request_that_has_been_dropped():
    asker = Asker()
    asker.open("asks")
    assert asker.ask("evaluate", [Query([2])]).error is None
    asker.end.drop(asker.number + 1)
    asker.end.drop(0)  # which comes late
    dropped = asker.ask("evaluate", [Query([2])])
    assert isinstance(dropped.error.error(), QueryDroppedError)
    assert asker.ask("evaluate", [Query([2])]).error is None


def test_errors_of_other_kinds_are_let_through():
    asker = Asker()
    asker.open("exits")
    with pytest.raises(SystemExit):
        asker.ask("evaluate", [Query([2])])
    asker = Asker(BaseException)
    asker.open("exits")
    assert isinstance(asker.ask("evaluate", [Query([2])]).error.error(), SystemExit)
