"""A complete backend of one's own: a recurrent network that keeps the state behind each prefix."""

import numpy as np
import torch

from genlm_backend.errors import AdapterError
from genlm_backend.llm import Evaluator, EvaluatorCounts, EvaluatorInfo, rows_of_logits

VOCAB = 96
WEIGHTS = np.random.default_rng(0).standard_normal((3, VOCAB, 16))


def state_after(state, token_id):
    return np.tanh(WEIGHTS[0, token_id] + WEIGHTS[1, :16] @ state / 4)


class ToyEvaluator(Evaluator):
    def __init__(self, max_length=None):
        self.info = EvaluatorInfo(VOCAB, max_length, num_slots=10_000)
        self.states, self.computed = {}, 0

    def open(self):
        return self.info

    def evaluate(self, queries):
        self.check_cancelled()
        logits = [WEIGHTS[2] @ self.state(query.token_ids) for query in queries]
        return rows_of_logits(torch.from_numpy(np.stack(logits)))

    def state(self, ids):
        if ids not in self.states:
            self.computed += 1
            before = self.state(ids[:-1]) if ids[1:] else np.zeros(16)
            self.states[ids] = state_after(before, ids[-1])
        return self.states[ids]

    def num_cached(self, query, tier=None):
        ids = query.token_ids
        return max(n for n in range(len(ids)) if not n or ids[:n] in self.states)

    def forget(self, query, keep):
        ids = query.token_ids
        for n in range(len(ids), keep, -1):
            if not any(other[:n] == ids[:n] for other in self.states if len(other) > n):
                self.states.pop(ids[:n], None)

    def pin(self, query):
        return bool(self.evaluate([query]))

    def clear(self):
        self.states.clear()

    close = clear

    def add_adapter(self, adapter, path):
        raise AdapterError(f"no adapters here: {adapter.name!r} is refused")

    def remove_adapter(self, adapter):
        self.clear()

    def counts(self):
        return EvaluatorCounts(tokens_computed=self.computed)
