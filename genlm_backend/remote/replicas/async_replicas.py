"""AsyncReplicas: one model that several evaluators compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self, Unpack, final

import torch

from genlm_backend.backends.hf.hf_loader import HFLoader, WeightFormat
from genlm_backend.backends.hf.options import HFOptions
from genlm_backend.backends.hf.picture_reader import PictureReader, check_processor
from genlm_backend.backends.loading import explained
from genlm_backend.batching import BatchPolicy
from genlm_backend.checks import (
    Check,
    Option,
    checks_of,
    defaults_of,
    instance,
    integer,
    listed,
    number,
    shows_options,
)
from genlm_backend.model.batched_lm import BatchedLM, LMOptions
from genlm_backend.queries.evaluator import Evaluator, EvaluatorInfo
from genlm_backend.queries.query import RowQuery
from genlm_backend.remote.process_evaluator import ProcessEvaluator
from genlm_backend.remote.ray_evaluator import RayEvaluator, connect
from genlm_backend.remote.replicas.replica_batcher import ReplicaBatcher
from genlm_backend.remote.replicas.replica_set import ReplicaSet


class ReplicaOptions(LMOptions, total=False):
    """Options of ``AsyncReplicas``, which documents them."""

    per_forward: Annotated[float, Option(8.0, number(0))]
    processor: Annotated[Any, Option(None, check_processor)]


class _OptionsByName(HFOptions, ReplicaOptions):
    pass


@final
class AsyncReplicas(BatchedLM):
    """Several evaluators of one model, with the interface of a single model.

    Each context goes to the replica that is estimated to answer it soonest. The estimate uses a
    replica's queue, and the contexts sent to it before, whose keys and values it caches. Rows,
    batches and adapters work as with one evaluator; ``batch_size`` holds for each replica.

    If a replica dies, the others get its unanswered contexts. If its evaluator is restartable, it
    is restarted, with attempts after pauses of 0, 1, 5 and 20 s, and later at each ``restart()``. A
    query raises an ``EngineDiedError`` if all replicas are dead, or once replicas have died three
    times while they computed the query (one replica repeatedly, or several).

    Args:
        tokenizer: Anything that ``decode_vocab`` takes.
        evaluators: The evaluators, which no other model may use. They must compute the same model,
            or rows would depend on the replica.
        batch_size: Maximum number of distinct contexts that a replica evaluates at once.
        timeout: Seconds that the first query of a batch may wait for others.
        row_cache_bytes: Bytes of rows to keep, whichever replica they come from; 0 keeps none.
        output_device: Device of the returned rows: "cpu", "cuda:0", …
        per_forward: Cost of a forward pass in addition to its tokens, counted in tokens. A larger
            value gives more weight to the passes that already wait at a replica.
        self_check: Whether to compare a few probe texts with the bytes of their tokens.
        processor: The processor for pictures, as for ``AsyncTransformer``.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, there is no evaluator, or the
            evaluators' vocabulary sizes differ.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **BatchedLM.option_checks,
        **checks_of(_OptionsByName),
    }

    library_opts: ClassVar[str] = "hf_opts"

    @shows_options(ReplicaOptions)
    def __init__(
        self, tokenizer: Any, evaluators: Sequence[Evaluator], **options: Unpack[ReplicaOptions]
    ) -> None:
        own, more = self._parted({**defaults_of(ReplicaOptions), **locals()})
        is_evaluator = instance(Evaluator, "an Evaluator")
        given = [is_evaluator("evaluators", one) for one in listed("evaluators", evaluators)]
        self._set = ReplicaSet(given)
        super().__init__(tokenizer, self._set, **own)
        for replica, info in zip(self._set.replicas, self._set.infos, strict=True):
            replica.answering.opened(info, len(self.byte_vocab), self.undefined_ids)
        self._distributor.opened(self._set.infos, more["per_forward"])
        token_id = self._info.image_token_id
        self._pictures = PictureReader(more["processor"], self.contexts, token_id, self._asker())

    def _asking(self, policy: BatchPolicy) -> ReplicaBatcher:
        """Make the replicas and the batcher that sends queries to them."""
        given = self._set.evaluators, self._rows, self._adapters, policy
        made = self._distributor = ReplicaBatcher(*given, type(self).__name__, self._is_back)
        self._set.begin(made.replicas, made.cleared)
        return made

    def _is_back(self, index: int, info: EvaluatorInfo) -> None:
        self._set.infos[index] = info
        self._info = self._set.info_of_all()

    @classmethod
    @shows_options(_OptionsByName, packs_weights=True)
    def from_name(
        cls,
        model_id: str,
        replicas: int = 2,
        bitsandbytes_opts: dict[str, Any] | None = None,
        hf_opts: dict[str, Any] | None = None,
        *,
        weights: WeightFormat | None = None,
        **options: Unpack[_OptionsByName],
    ) -> Self:
        """Load a transformers model several times, each in a process of its own.

        Replicas are assigned to the CUDA devices in turn. If no device exists, or ``device_map`` or
        ``weights`` is given, each instead gets its share of the cores as default ``num_threads``.

        Args:
            model_id: A repository on the hub, a local directory, or ``"smollm2"``.
            replicas: Number of processes.
            bitsandbytes_opts: Options of ``BitsAndBytesConfig``, as for ``AsyncTransformer``.
            hf_opts: Options of ``AutoModelForCausalLM.from_pretrained``.
            weights: Number format of the weights, as for ``AsyncTransformer``.
            **options: Options of the constructor, and of each replica's model as for
                ``AsyncTransformer``; ``packs_weights`` is ``True`` by default.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown, of a wrong type, or cannot
                be pickled for another process; nothing is loaded then.
            OptionError: (``ValueError``) If one is out of its bounds.
            ModelNotFoundError: (``OSError``) If there is no such model.
        """
        count = integer(1)("replicas", replicas)
        loader, own = HFLoader.of_name(model_id, bitsandbytes_opts, hf_opts, weights, options, cls)
        loader.check_portable()
        with explained(model_id):
            tokenizer = loader.tokenizer()
            made = [ProcessEvaluator(maker) for maker in _placed(loader, count, hf_opts or {})]
            return cls(tokenizer, made, **own)

    @classmethod
    @shows_options(_OptionsByName, packs_weights=True)
    def on_ray(
        cls,
        model_id: str,
        num_replicas: int = 2,
        *,
        address: str | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
        max_restarts: int = -1,
        bitsandbytes_opts: dict[str, Any] | None = None,
        hf_opts: dict[str, Any] | None = None,
        weights: WeightFormat | None = None,
        **options: Unpack[_OptionsByName],
    ) -> Self:
        """Load a transformers model several times, each in an actor of a Ray cluster.

        Ray places the actors. Their nodes need the caller's version of this library, and the model,
        since each node resolves the name itself. Other options are documented in ``from_name``.

        Args:
            model_id: A repository on the hub, ``"smollm2"``, or a directory that every node has.
            num_replicas: Number of actors.
            address: Address of the cluster for ``ray.init``; unused if this process is already in a
                cluster. Default: ``RAY_ADDRESS``, a cluster that runs on this machine, or a new
                one; ``"local"`` starts a new one.
            num_cpus: Cores that Ray reserves for each actor; also the default of ``num_threads``.
            num_gpus: Number of GPUs that Ray reserves for each actor; fractions are allowed.
            max_restarts: Number of times that Ray restarts an actor; -1 for any number.
            **options: As for ``from_name``.

        Raises:
            OptionError: (``ValueError``) If an option is out of its bounds, or no cluster answers.
            MissingExtraError: (``ImportError``) Without Ray.
            Exception: As for ``from_name``.
        """
        count = integer(1)("num_replicas", num_replicas)
        if options.get("num_threads") is None:
            options["num_threads"] = max(1, int(number(0)("num_cpus", num_cpus)))
        loader, own = HFLoader.of_name(model_id, bitsandbytes_opts, hf_opts, weights, options, cls)
        loader.check_portable()
        reserved = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": max_restarts}
        made = [RayEvaluator(loader, **reserved) for _ in range(count)]
        with explained(model_id):
            tokenizer = loader.tokenizer()
            connect(address)
            return cls(tokenizer, made, **own)

    # ---------------------------------------------------------------- replicas

    @property
    def num_replicas(self) -> int:
        """Number of replicas, including dead ones."""
        return len(self._set.replicas)

    @property
    def num_alive(self) -> int:
        """Number of replicas that are alive; 0 after ``close()``."""
        return self._distributor.num_alive

    def restart(self) -> None:
        """Restart the dead replicas now; blocks the thread.

        Raises:
            ModelStateError: (``RuntimeError``) If a dead replica cannot be restarted.
            Exception: Any error of loading the model; a second attempt is allowed.
        """
        self._call(self._set.find_dead)
        self._set.restart()

    # ---------------------------------------------------------------- statistics

    async def _number_of(self, method: Callable[[Evaluator], int | None]) -> int:
        self._batcher.check_open()
        return await self._set.largest(method)

    # ---------------------------------------------------------------- keys and values

    def _is_kept(self, query: RowQuery) -> None:
        self._distributor.sent_to_all(query)


def _placed(loader: HFLoader, count: int, hf_opts: Mapping[str, Any]) -> list[HFLoader]:
    """Return a loader per replica: on the CUDA devices in turn, or with a share of the cores."""
    num_devices = torch.cuda.device_count()
    if num_devices and "device_map" not in hf_opts and loader.weights is None:
        places = [{"device_map": f"cuda:{index % num_devices}"} for index in range(count)]
        return [replace(loader, options={**loader.options, **place}) for place in places]
    if loader.evaluator.get("num_threads") is None:
        num_threads = max(1, (os.cpu_count() or 1) // count)
        loader = replace(loader, evaluator={**loader.evaluator, "num_threads": num_threads})
    return [loader] * count
