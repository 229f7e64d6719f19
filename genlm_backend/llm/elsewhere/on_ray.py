"""RayEvaluator: an evaluator that lives in an actor of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
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
from genlm_backend.llm.elsewhere.process import pickled
from genlm_backend.llm.elsewhere.remote import RemoteEvaluator
from genlm_backend.llm.evaluator import Evaluator
from genlm_backend.llm.row import own_copy

_LOOK_SECONDS: Final = 0.05
"""Seconds between two looks at whether anybody waits."""
_RETURN_SECONDS: Final = 60.0
"""Seconds that Ray has to start an actor again, before another one is asked for."""
_ANSWER_SECONDS: Final = 5.0
"""Seconds that an address has to take a connection."""


@final
class RayEvaluator(RemoteEvaluator):
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
        super().__init__()
        self._made_by = pickled("make", function("make", make))
        self._options = {
            "num_cpus": number(0)("num_cpus", num_cpus),
            "num_gpus": number(0)("num_gpus", num_gpus),
            "max_restarts": integer(-1)("max_restarts", max_restarts),
        }
        self._actor: Any = None
        self._number = 0
        self._table: Any = None

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Return what a method of the evaluator returns over there; see the base."""
        import ray  # pyright: ignore[reportMissingImports]

        if self._actor is None:
            raise EngineDiedError("the replica has no actor; restart() starts one")
        self._number += 1
        try:
            asked = self._actor.ask.remote(self._number, verb, pickle.dumps(arguments))
            while not ray.wait([asked], timeout=_LOOK_SECONDS)[0]:
                self.check_wanted()
            reply: ActorReply = ray.get(asked)
        except QueryDroppedError:
            self._actor.drop.options(concurrency_group="dropping").remote(self._number)
            raise
        except ray.exceptions.RayError as error:
            said = str(error).strip().split("\n")[0]
            raise EngineDiedError(f"the actor of a replica has died: {said}") from error
        if isinstance(reply.value, str) and reply.value == NOT_OPEN:
            raise EngineDiedError("the actor of a replica has been started again")
        self._counts = reply.counts or self._counts
        if reply.error is not None:
            raise reply.error.error()
        self._table = reply.table
        return reply.value

    def _started(self) -> Any:
        import ray  # pyright: ignore[reportMissingImports]

        if self._actor is None:
            actor_class = ray.remote(concurrency_groups={"dropping": 1})(EvaluatorActor)
            self._actor = actor_class.options(**self._options).remote()
        return self.ask("open", self._made_by, library_version())

    def _end(self, is_kind: bool) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        if not is_kind and self._actor is not None and self._is_there():
            return  # started again by Ray, maybe on another node
        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)

    def _is_there(self) -> bool:
        """Whether the actor answers, or Ray is about to start it again."""
        import ray  # pyright: ignore[reportMissingImports]

        end = time.monotonic() + _RETURN_SECONDS
        while time.monotonic() < end:
            self.check_wanted()
            try:
                asked = self._actor.drop.options(concurrency_group="dropping").remote(-1)
                if ray.wait([asked], timeout=_LOOK_SECONDS)[0]:
                    ray.get(asked)
                    return True
            except ray.exceptions.ActorUnavailableError:
                time.sleep(_LOOK_SECONDS)
            except ray.exceptions.RayError:
                return False
        return False

    def _rows(self, num_rows: int, width: int) -> Iterator[torch.Tensor]:
        table, self._table = self._table, None
        return iter(()) if table is None else map(own_copy, table)


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
        import ray  # pyright: ignore[reportMissingImports]
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
