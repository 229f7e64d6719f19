"""An engine that counts sessions and blocks as vLLM does, and computes pseudo-random rows."""

import threading

import torch

from genlm_backend.backends.mock import MockEvaluator
from genlm_backend.backends.vllm.session_planner import Scored
from genlm_backend.errors import AdapterError
from genlm_backend.queries.query import NO_QUERY, RowQuery
from genlm_backend.readouts.sampling import Sampler
from tests.llm import families
from tests.llm.conftest import word_tokenizer


class FakeEngine:
    """Refuses what vLLM could not do: too many sessions or blocks, prefixes that are not there."""

    def __init__(
        self, max_sessions=8, num_blocks=64, block_size=4, max_length=63, eos_token_ids=None
    ):
        self.tokenizer = word_tokenizer()
        self.vocab_size = None
        self.max_sessions, self.num_blocks, self.block_size = max_sessions, num_blocks, block_size
        self.kv_cache_dtype = self.image_token_id = None
        self.max_length, self.eos_token_ids = max_length, eos_token_ids
        self.scores_texts = True
        self.num_steps = 0
        self.has_died = False
        self.num_sampled = []  # of each step: how many completions, and of how many
        self.sessions, self.added = {}, {}
        self.completions = {}
        self.adapters = {}
        self.is_closed = False
        self.failures = []
        self.shortages = []  # of the next steps: how many contexts find no room
        self.may_sample = threading.Event()
        self.may_sample.set()
        self._mock = MockEvaluator(families.VOCAB)

    def num_free_blocks(self):
        """Full blocks are shared by whoever has the same prefix; a partial one is its own."""
        shared = {
            ids[:end]
            for ids in self.sessions.values()
            for end in range(self.block_size, len(ids) + 1, self.block_size)
        }
        num_partial = sum(len(ids) % self.block_size > 0 for ids in self.sessions.values())
        return self.num_blocks - len(shared) - num_partial

    def add(self, placement):
        assert not self.is_closed
        ids, session = placement.query.token_ids, placement.session
        shared = ids[: placement.num_shared]
        assert len(shared) == placement.num_shared < len(ids)
        if placement.is_new:
            assert session not in self.sessions
            assert (placement.source is None) == (not shared)
            if placement.source is not None:
                assert self.sessions[placement.source][: len(shared)] == shared
            assert placement.num_extended == 0
        else:
            assert session not in self.added
            assert self.sessions[session] == shared
            assert self.sessions[session] == ids[: placement.num_extended]
        self.added[session] = ids

    def run(self, session_ids, relieve, wanted=None):
        assert set(session_ids) == set(self.added)
        if self.failures:
            raise self.failures.pop()
        self.num_steps += 1
        least = 0 if self.sessions else 1  # one fits alone
        shortage = self.shortages.pop() if self.shortages else 0
        places = range(max(len(session_ids) - shortage, least))
        computed = [session_ids[i] for i in places]
        self.sessions.update((session, self.added.pop(session)) for session in computed)
        assert len(self.sessions) <= self.max_sessions
        assert self.num_free_blocks() >= 0
        self._sample()
        if not computed:
            return {}
        rows = self._rows_of([self.sessions[session] for session in computed])
        answers = rows if wanted is None else wanted.of(places).answers(rows)
        return dict(zip(computed, answers, strict=True))

    def _rows_of(self, contexts):
        return self._mock.evaluate([RowQuery(context) for context in contexts])

    def score(self, texts, relieve):
        assert len(self.sessions) + len(texts) <= 2 * self.max_sessions
        if self.failures:
            raise self.failures.pop()
        self.num_steps += 1
        self._sample()
        found = []
        for text in texts:
            assert self.num_free_blocks() >= len(text.text.context) // self.block_size
            ids = text.text.token_ids
            rows = self._rows_of([ids[:end] for end in range(text.start, len(ids))])
            scores = [row.logprobs[i] for row, i in zip(rows, ids[text.start :], strict=True)]
            found.append(Scored(torch.stack(scores), len(ids), 0))
        return found

    def start(self, completion, forbidden, source=None, num_shared=0):
        assert not self.is_closed
        if source is not None:
            ids = completion.prompt.token_ids
            assert self.sessions[source][:num_shared] == ids[:num_shared]
            assert num_shared < len(ids)
        assert completion.num_possible > 0
        self.completions[completion.id] = completion

    def step(self, relieve):
        """As many completions as there are places beside the sessions."""
        if not self.may_sample.wait(0.001):
            return
        if self.failures:
            raise self.failures.pop()
        if len(self.sessions) >= self.max_sessions:
            assert relieve()
        self.num_steps += bool(self.completions)
        self._sample()

    def _sample(self):
        self.stop([c for c in self.completions.values() if c.future.cancelled()])
        running = list(self.completions.values())[: self.max_sessions - len(self.sessions)]
        if running:
            self.num_sampled.append((len(running), len(self.completions)))
        for completion in running:
            sampled = completion.token_ids
            sampler = Sampler(completion.temperature, completion.seed, len(sampled))
            context = completion.prompt.token_ids + tuple(sampled)
            (row,) = self._rows_of([context])
            ((token_id, *_),) = sampler.drawing(NO_QUERY).of_row(row)
            is_last = len(sampled) + 1 == completion.num_possible
            is_finished = is_last or token_id in completion.eos_token_ids
            if is_finished:
                del self.completions[completion.id]
            completion.extend([token_id], is_finished)

    def stop(self, completions):
        for completion in completions:
            del self.completions[completion.id]

    def add_adapter(self, adapter, path):
        if path.startswith("/nowhere"):
            raise AdapterError(f"no adapter {adapter.name!r} at {path}")
        self.adapters[adapter] = path

    def remove_adapter(self, adapter):
        assert not self.sessions
        assert all(c.prompt.adapter != adapter for c in self.completions.values())
        del self.adapters[adapter]

    def end(self, session_ids):
        for session_id in session_ids:
            self.sessions.pop(session_id, None)
            self.added.pop(session_id, None)

    def reset(self):
        assert not self.sessions

    def close(self):
        self.is_closed = True
