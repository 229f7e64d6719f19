"""RayEvaluator: an evaluator that lives in an actor of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, final

import torch

from genlm_backend.checks import function, integer, number
from genlm_backend.errors import (
    EngineDiedError,
    MissingExtraError,
    OptionError,
    OptionTypeError,
    QueryDroppedError,
)
from genlm_backend.llm.elsewhere.actor import NOT_OPEN, ActorReply, EvaluatorActor, library_version
from genlm_backend.llm.elsewhere.messages import Answers, InTable, PackedError
from genlm_backend.llm.elsewhere.process import pickled
from genlm_backend.llm.evaluator import (
    Evaluator,
    EvaluatorCounts,
    EvaluatorInfo,
    RestartableEvaluator,
)
from genlm_backend.llm.query import Adapter, Query
from genlm_backend.llm.row import Row, own_copy
from genlm_backend.llm.scoring import Answer, Question
from genlm_backend.llm.threads import frequent_switches

_LOOK_SECONDS: Final = 0.05
"""Seconds between two looks at whether anybody waits."""
_ANSWER_SECONDS: Final = 5.0
"""Seconds that an address has to take a connection."""


@final
class RayEvaluator(RestartableEvaluator):
    """An evaluator in an actor, where Ray places it; one remote call for each batch.

    Rows come back through Ray's object store. Errors arrive as what they are. An actor that dies is
    started again by Ray, on another node where its own has gone, and loaded by ``restart()``.

    Args:
        make: Makes the evaluator, and is called over there; it has to pickle.
        num_cpus: Number of cores that Ray reserves for the actor.
        num_gpus: Number of GPUs, which may be a fraction.
        max_restarts: Number of times that Ray starts the actor again; -1 for any number.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of a wrong type, or cannot be pickled.
        OptionError: (``ValueError``) If one is out of its bounds.
    """

    def __init__(
        self,
        make: Callable[[], Evaluator],
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        max_restarts: int = -1,
    ) -> None:
        self._made_by = pickled("make", function("make", make))
        self._options = {
            "num_cpus": number(0)("num_cpus", num_cpus),
            "num_gpus": number(0)("num_gpus", num_gpus),
            "max_restarts": integer(-1)("max_restarts", max_restarts),
        }
        self._actor: Any = None
        self._number = 0
        self._counts = EvaluatorCounts()
        self._adapters: dict[Adapter, str] = {}
        self._sent_ids: tuple[int, ...] = ()

    # ---------------------------------------------------------------- beginning and ending

    def open(self) -> EvaluatorInfo:
        """Have Ray place an actor, which makes the evaluator; return what that is able to do."""
        import ray

        if self._actor is None:
            actor_class = ray.remote(concurrency_groups={"dropping": 1})(EvaluatorActor)
            self._actor = actor_class.options(**self._options).remote()
        self._sent_ids = ()
        info = self.ask("open", self._made_by, library_version())
        if not isinstance(info, EvaluatorInfo):
            return info  # for the caller to refuse
        return replace(info, uses_openmp=False, draws=True, device=_no_device_of_here(info.device))

    def restart(self) -> EvaluatorInfo:
        """Load the evaluator again, in the actor that Ray has started again or in a new one."""
        try:
            info = self.open()
        except EngineDiedError:
            self._kill()
            info = self.open()
        for adapter, path in self._adapters.items():
            self.ask("add_adapter", adapter, path)
        return info

    def close(self) -> None:
        """End the actor; again has no effect."""
        self._kill()
        self._counts = replace(self._counts, kv_bytes_used=0, kv_bytes_budget=0)

    def _kill(self) -> None:
        import ray

        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Return what a method of the evaluator returns over there.

        Raises:
            EngineDiedError: If the actor has died, or has not been opened since it was restarted.
            Exception: What the method raised.
        """
        return self._asked(verb, arguments).value

    def _asked(self, verb: str, arguments: tuple[Any, ...]) -> ActorReply:
        import ray

        if self._actor is None:
            raise EngineDiedError("the replica has no actor; restart() starts one")
        self._number += 1
        try:
            asked = self._actor.ask.remote(self._number, verb, arguments)
            while not ray.wait([asked], timeout=_LOOK_SECONDS)[0]:
                self.check_wanted()
            reply: ActorReply = ray.get(asked)
        except QueryDroppedError:
            self._actor.drop.options(concurrency_group="dropping").remote(self._number)
            raise
        except ray.exceptions.RayError as error:
            said = str(error).strip().split("\n")[0]
            raise EngineDiedError(f"the actor of a replica has died: {said}") from error
        if reply.value == NOT_OPEN and isinstance(reply.value, str):
            raise EngineDiedError("the actor of a replica has been started again")
        if reply.counts is not None:
            self._counts = reply.counts
        if reply.error is not None:
            raise reply.error.error()
        return reply

    # ---------------------------------------------------------------- rows and scores

    def evaluate(self, queries: Sequence[Question]) -> Sequence[Answer | Exception]:
        """Return one answer to each query, scoring or drawing."""
        if self._sent_ids != self.undefined_ids:
            self.ask("undefined_ids", self.undefined_ids)
            self._sent_ids = self.undefined_ids
        with frequent_switches():
            reply = self._asked("evaluate", (list(queries),))
            found = reply.value
            if not isinstance(found, Answers):
                return found  # for the caller to refuse
            rows = iter([] if reply.table is None else map(own_copy, reply.table))
            return [_unpacked(answer, rows) for answer in found.answers]

    # ---------------------------------------------------------------- what is kept

    def num_cached(self, query: Query) -> int:
        """Return how many of a context's tokens need not be computed if it is asked now."""
        return self.ask("num_cached", query)

    def forget(self, query: Query, keep: int) -> None:
        """Free the keys and values of a context beyond its first ``keep`` tokens."""
        with contextlib.suppress(EngineDiedError):  # they have gone with the actor
            self.ask("forget", query, keep)

    def pin(self, query: Query) -> bool:
        """Compute a context and keep its keys and values; return whether there was room."""
        return self.ask("pin", query)

    def clear(self) -> None:
        """Free all keys and values."""
        with contextlib.suppress(EngineDiedError):
            self.ask("clear")

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter, from a path that is there on the actor's node."""
        self.ask("add_adapter", adapter, path)
        self._adapters[adapter] = path

    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove an adapter."""
        self._adapters.pop(adapter, None)
        with contextlib.suppress(EngineDiedError):
            self.ask("remove_adapter", adapter)

    def counts(self) -> EvaluatorCounts:
        """Return what the evaluator had done when it last answered."""
        return self._counts


def _unpacked(answer: Any, rows: Any) -> Any:
    if isinstance(answer, InTable):
        return Row(next(rows), answer.normaliser)
    return answer.error() if isinstance(answer, PackedError) else answer


def _no_device_of_here(device: str | None) -> str | None:
    """Return a device's name where this process has one of it too."""
    if device is None or not device.startswith("cuda") or torch.cuda.is_available():
        return device
    return None


def connect(address: Any = None) -> None:
    """Join a Ray cluster, or start a local one, unless this process is in one already.

    Args:
        address: Address as ``ray.init`` takes it; ``None`` for what ``RAY_ADDRESS`` says, and a
            local cluster where it says nothing.

    Raises:
        OptionTypeError: (``TypeError``) If the address is no string.
        OptionError: (``ValueError``) If no cluster answers there.
        MissingExtraError: (``ImportError``) Without Ray.
    """
    if address is not None and not isinstance(address, str):
        raise OptionTypeError(f"address must be a string or None, got {address!r}")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Ray is needed: pip install 'genlm-backend[ray]'") from error
    if ray.is_initialized():
        return
    where = address or os.environ.get("RAY_ADDRESS")
    try:
        _check_answers(where)
        ray.init(address=where, log_to_driver=False)
    except (OSError, ConnectionError, RuntimeError, ValueError) as error:
        if where is None:
            raise
        said = str(error).strip().split("\n")[0]
        raise OptionError(f"address: no Ray cluster answers at {where!r}: {said}") from error


def _check_answers(address: str | None) -> None:
    """Raise an ``OSError`` at once where nobody listens, which Ray takes long to find out."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
