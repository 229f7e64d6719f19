"""An engine that counts sessions and blocks as vLLM does, and computes pseudo-random rows."""

from genlm_backend import MockAsyncLM
from genlm_backend.llm.query import Query
from tests.llm.conftest import word_tokenizer


class FakeEngine:
    """Refuses what vLLM could not do: too many sessions or blocks, prefixes that are not there."""

    def __init__(self, max_sessions=8, num_blocks=64, block_size=4, max_length=63):
        self.tokenizer = word_tokenizer()
        self.vocab_size = None
        self.max_sessions, self.num_blocks, self.block_size = max_sessions, num_blocks, block_size
        self.max_length = max_length
        self.num_steps = 0
        self.sessions, self.added = {}, {}
        self.is_closed = False
        self.failures = []
        self._mock = MockAsyncLM(self.tokenizer, row_cache_bytes=0)

    def num_free_blocks(self):
        """Full blocks are shared by whoever has the same prefix; each session has one more."""
        shared = {
            ids[:end]
            for ids in self.sessions.values()
            for end in range(self.block_size, len(ids) + 1, self.block_size)
        }
        return self.num_blocks - len(shared) - len(self.sessions)

    def add(self, step):
        assert not self.is_closed
        ids = step.query.token_ids
        assert 0 <= step.num_shared < len(ids)
        if step.is_new:
            assert step.session not in self.sessions
            assert (step.source is None) == (step.num_shared == 0)
            if step.source is not None:
                assert self.sessions[step.source][: step.num_shared] == ids[: step.num_shared]
            assert step.new_tokens == ids
        else:
            assert step.session not in self.added
            assert self.sessions[step.session] == ids[: step.num_shared]
            assert self.sessions[step.session] + step.new_tokens == ids
        self.added[step.session] = ids

    def run(self, session_ids):
        assert set(session_ids) == set(self.added)
        if self.failures:
            raise self.failures.pop()
        self.num_steps += 1
        self.sessions.update(self.added)
        self.added = {}
        assert len(self.sessions) <= self.max_sessions
        assert self.num_free_blocks() >= 0
        queries = [Query(self.sessions[session_id]) for session_id in session_ids]
        return self._mock.evaluate(queries)

    def release(self, session_ids):
        for session_id in session_ids:
            self.sessions.pop(session_id, None)
            self.added.pop(session_id, None)

    def reset(self):
        assert not self.sessions

    def close(self):
        self.is_closed = True
