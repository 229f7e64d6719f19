"""A mock whose rows a test can hold up, count or break."""

from genlm_backend import MockAsyncLM


class HookedMock(MockAsyncLM):
    """A mock that asks its own ``evaluate`` for rows, which a test overrides."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._own = self._evaluator.evaluate
        self._evaluator.evaluate = lambda queries: self.evaluate(queries)

    def evaluate(self, queries):
        return self._own(queries)
