"""RayEvaluator: an evaluator in an actor of a Ray cluster, and the actor's class."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import numpy as np
import torch

from genlm_backend.checks import function, integer, number
from genlm_backend.errors import (
    EngineDiedError,
    MissingExtraError,
    OptionError,
    OptionTypeError,
    QueryDroppedError,
)
from genlm_backend.queries.evaluator import Evaluator
from genlm_backend.queries.row import Row, own_table, put_rows
from genlm_backend.remote.evaluator_server import EvaluatorServer, library_version
from genlm_backend.remote.messages import Reply, Request, Table
from genlm_backend.remote.process_evaluator import pickled
from genlm_backend.remote.remote_evaluator import RemoteEvaluator

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.05
"""Seconds between two checks that a caller still waits."""
_RETURN_SECONDS: Final = 60.0
"""Seconds that Ray gets to restart an actor before a new one is made."""
_PLACE_SECONDS: Final = 15.0
"""Seconds after which a wait for Ray to place an actor is logged."""
_ANSWER_SECONDS: Final = 5.0
"""Timeout in seconds of a connection to the cluster's address."""


@final
class EvaluatorActor:
    """The Ray actor: answers requests; rows return with the reply, through Ray's object store."""

    def __init__(self) -> None:
        self._end = EvaluatorServer(_with_reply)

    def ask(self, number: int, method: str, packed: bytes) -> Reply:
        return self._end.reply(Request(number, method, packed))

    def drop(self, number: int) -> None:
        """Cancel requests up to this number; -1 cancels none, but shows that the actor answers."""
        self._end.drop(number)


def _with_reply(rows: list[Row]) -> tuple[Table, list[Row]]:
    table = np.empty((len(rows), len(rows[0].logprobs)), np.float32)
    put_rows(rows, table)
    return table, []


@final
class RayEvaluator(RemoteEvaluator):
    """An evaluator in an actor that Ray places; one remote call per batch.

    Rows come back through Ray's object store. Errors keep their type if they can be pickled. Ray
    restarts an actor that dies, on another node if its node is lost; ``restart()`` then loads the
    model again.

    Args:
        make: Makes the evaluator when called in the actor; it has to be picklable.
        num_cpus: Number of cores that Ray reserves for the actor.
        num_gpus: Number of GPUs that Ray reserves for the actor; fractions are allowed.
        max_restarts: Number of times that Ray restarts the actor; -1 for any number.

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
        self._job = ""
        self._number = 0
        self._table: Any = None

    def _check_alive(self) -> None:
        if self._actor is None:
            raise EngineDiedError("the replica has no actor: start a new actor with restart()")
        if not self._is_of_this_session():
            raise EngineDiedError("Ray has been shut down, and the replica's actor with it")

    def _reply(self, method: str, packed: bytes) -> Reply:
        import ray
        from ray.exceptions import RayError

        self._number += 1
        try:
            asked = self._actor.ask.remote(self._number, method, packed)
            while not ray.wait([asked], timeout=_LOOK_SECONDS)[0]:
                self.check_cancelled()
            reply: Reply = ray.get(asked)
        except QueryDroppedError:
            self._actor.drop.options(concurrency_group="dropping").remote(self._number)
            raise
        except RayError as error:
            reason = " ".join(str(error).split())
            raise EngineDiedError(f"the actor of the replica has died: {reason}") from error
        self._table = reply.table
        return reply

    def _started(self) -> Any:
        connect()
        import ray

        if self._actor is None:
            remote: Any = ray.remote  # Ray's type stubs lack concurrency groups
            actor_class = remote(concurrency_groups={"dropping": 1})(EvaluatorActor)
            self._actor = actor_class.options(**self._options).remote()
            self._job = ray.get_runtime_context().get_job_id()
            self._wait_for_place()
        return self.ask("open", self._made_by, library_version())

    def _is_of_this_session(self) -> bool:
        """Return whether this process is still in the Ray session in which the actor was made."""
        import ray

        return ray.is_initialized() and ray.get_runtime_context().get_job_id() == self._job

    def _wait_for_place(self) -> None:
        """Wait until Ray has placed a new actor; log a warning after ``_PLACE_SECONDS``."""
        import ray

        placed = self._actor.drop.options(concurrency_group="dropping").remote(-1)
        begin = time.monotonic()
        is_told = False
        while not ray.wait([placed], timeout=_LOOK_SECONDS)[0]:
            self.check_cancelled()
            if not is_told and time.monotonic() - begin > _PLACE_SECONDS:
                is_told = True
                asked = {n: self._options[n] for n in ("num_cpus", "num_gpus")}
                logger.warning(
                    "a replica is waiting for Ray to place it: it needs %s; the cluster has %s, "
                    "with %s free",
                    asked,
                    _countable(ray.cluster_resources()),
                    _countable(ray.available_resources()),
                )

    def _end(self, is_kind: bool) -> None:
        if self._actor is None:
            return
        if not self._is_of_this_session():
            self._actor = None
            return
        if not is_kind and self._is_there():
            return  # the actor answers, perhaps restarted by Ray: keep it
        import ray
        from ray.exceptions import RayError

        actor, self._actor = self._actor, None
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor)

    def _is_there(self) -> bool:
        """Return whether the actor answers within ``_RETURN_SECONDS``, perhaps restarted by Ray."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        end = time.monotonic() + _RETURN_SECONDS
        while time.monotonic() < end:
            self.check_cancelled()
            try:
                asked = self._actor.drop.options(concurrency_group="dropping").remote(-1)
                if ray.wait([asked], timeout=_LOOK_SECONDS)[0]:
                    ray.get(asked)
                    return True
            except ActorUnavailableError:
                time.sleep(_LOOK_SECONDS)
            except RayError:
                return False
        return False

    def _tables(self, num_rows: int, width: int) -> Iterator[torch.Tensor]:
        table, self._table = self._table, None
        if table is not None:
            yield own_table(table)


def _countable(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}


def connect(address: Any = None) -> None:
    """Join a Ray cluster, or start a local one, unless this process is in a cluster already."""
    if address is not None and not isinstance(address, str):
        raise OptionTypeError(f"address must be a string or None, got {address!r}")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Ray is not installed: pip install 'genlm-backend[ray]'") from error
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
        raise OptionError(f"cannot join a Ray cluster at the address {where!r}: {said}") from error


def _check_answers(address: str | None) -> None:
    """Raise an ``OSError`` if nothing listens at a ``host:port``: Ray would take longer to fail."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
