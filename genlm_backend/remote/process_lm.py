"""ProcessLM: a model that may live in a process of its own."""

from __future__ import annotations

from genlm_backend.errors import ModelStateError
from genlm_backend.model.batched_lm import WholeLM
from genlm_backend.remote.process_evaluator import ProcessEvaluator


class ProcessLM(WholeLM):
    """A model whose evaluator may be a ``ProcessEvaluator``."""

    @property
    def process_id(self) -> int | None:
        """Number of the process that the model lives in; ``None`` where it is this one."""
        found = self._evaluator
        return found.process_id if isinstance(found, ProcessEvaluator) else None

    def restart(self) -> None:
        """End the process that the model lives in, and load the model and its adapters again.

        Comes after the batch that is being evaluated, and blocks the thread. Rows that are cached
        stay, keys and values have gone, and counts begin anew.

        Raises:
            ModelStateError: (``RuntimeError``) If the model lives in this process.
            Exception: What loading raises; it may be tried again.
        """
        if not isinstance(self._evaluator, ProcessEvaluator):
            raise ModelStateError("only a model of a process of its own can be restarted")
        self._info = self._call(self._evaluator.restart)
