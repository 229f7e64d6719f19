"""Evaluators that other processes make."""

import os
import signal
import sys
import time
import warnings
from functools import cache
from tempfile import mkdtemp

import numpy as np
import torch

from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.llm import EvaluatorInfo, Row, StatelessEvaluator, rows_of_logits
from tests.llm import toy


def word_tokenizer():
    """One made-up word for each id."""
    from tokenizers import Tokenizer, models

    words = {f"<{i}>": i for i in range(toy.VOCAB)}
    return Tokenizer(models.WordLevel(words, unk_token="<0>"))


def make_number():
    return 5


def make_nothing():
    raise OSError(28, "by the test")


@cache
def saved(name):
    """A folder with a tiny model of a family, saved once in the process of the tests."""
    from tests.llm import families

    folder = mkdtemp()
    families.make(name).save_pretrained(folder)
    return folder


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.lock = sys.stderr


class Told(StatelessEvaluator):
    """Does what the last token of a context says; its rows tell the process and the context."""

    info = EvaluatorInfo(vocab_size=toy.VOCAB, scores=True)

    def __init__(self):
        super().__init__(toy.VOCAB)
        self.info = type(self).info
        self.log = []

    def evaluate(self, queries):
        self.log.append(len(queries))
        answers = []
        for query in queries:
            if not hasattr(query, "token_ids"):
                table = torch.arange(100.0)
                answers.append(-table[: query.num_targets])
                continue
            last = query.token_ids[-1]
            answers.append(self.told(last, query))
        return answers

    def told(self, last, query):
        if last == 90:
            self.take_long(10)
        elif last == 91:
            os.kill(os.getpid(), signal.SIGKILL)
        elif last == 92:
            os._exit(3)
        elif last == 93:
            bar = "\rLoading weights: 100%|████| 9/9 [00:00<00:00, 99.10it/s]\r\n"
            print("the last words", bar, bar * 60, file=sys.stderr, flush=True)
            os.abort()
        elif last == 94:
            raise TokenizerDecodeError("tokenizer", "by the test", 5, "five")
        elif last == 95:
            return Unpicklable(1, 2)
        elif last == 89:
            return KeyError("its own")
        elif last == 88:
            return Row(torch.zeros(3, dtype=torch.float64))
        elif last == 87:
            time.sleep(0.3)
        elif last == 86:
            warnings.warn("said over there", stacklevel=2)
        elif last == 85:
            raise torch.OutOfMemoryError("CUDA out of memory")
        (row,) = rows_of_logits(torch.from_numpy(logits_of(query.token_ids))[None])
        return row

    def take_long(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check_cancelled()
            time.sleep(0.01)


def logits_of(token_ids):
    return np.random.default_rng([*token_ids]).standard_normal(toy.VOCAB)


def expected_row(token_ids):
    return torch.from_numpy(logits_of(token_ids)).float().log_softmax(-1)


class Wide(StatelessEvaluator):
    """Rows so wide that few of them are handed over at once."""

    WIDTH = 6_000_000

    def __init__(self):
        super().__init__(self.WIDTH)

    def evaluate(self, queries):
        return [Row(torch.full((self.WIDTH,), -float(query.token_ids[-1]))) for query in queries]
