"""AsyncVirtualLM: a model evaluated by vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, final

import torch

from genlm_backend.backends.loading import cache_opts as check_cache_opts
from genlm_backend.backends.loading import (
    check_holds,
    check_reachable,
    explained,
    resolve_name,
    row_cache,
)
from genlm_backend.backends.vllm.completion import LEAST_TEMPERATURE, Completion
from genlm_backend.backends.vllm.release import check_release
from genlm_backend.backends.vllm.vllm_evaluator import VLLMEvaluator, compare_rows
from genlm_backend.backends.vllm.vllm_picture_reader import VLLMPictureReader
from genlm_backend.checks import Check, integer, mapping, optional, shows_options, switch, text
from genlm_backend.errors import BatcherClosedError, OptionError
from genlm_backend.model.batched_lm import BatchedLM, LMOptions
from genlm_backend.queries.context import Context
from genlm_backend.queries.query import Adapter
from genlm_backend.readouts.sampling import Sampled
from genlm_backend.runtime.progress import progress_bar

if TYPE_CHECKING:  # it imports vLLM
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine


@final
class AsyncVirtualLM(BatchedLM):
    """A model of vLLM whose next-token log-probabilities can be awaited.

    Each context lives in vLLM as a session: a token more extends it, a fork of it copies one
    block. Sessions are bounded by vLLM's own limits and ended oldest first. Everything that
    waits runs on one thread, so that no event loop waits for a forward pass.

    LoRA adapters need an engine with ``engine_opts={"enable_lora": True}``; ``max_loras`` of them
    can be in one batch, ``max_lora_rank`` bounds their rank.

    ``sample`` and ``batch_sample`` use vLLM's own sampler, so that no row leaves vLLM for them. A
    seed gives other draws than on other backends, and a temperature is 0 or at least 0.01, which
    vLLM takes for whatever is between.

    Args:
        engine: What ``from_name`` makes.
        cache_size: Rows to keep, at most; 0 bounds them by bytes only.
        cache_opts: ``max_bytes`` of the rows kept, in place of ``row_cache_bytes``, and
            ``move_to_cpu``: whether to keep them in main memory, wherever they are returned.
        max_length: The longest context to take, where it is less than vLLM's
            ``max_model_len - 1`` (one place is for a token that vLLM samples).
        **options: ``batch_size``, ``timeout``, ``row_cache_bytes``, ``output_device`` and
            ``self_check``, as of ``BatchedLM``.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of a wrong type, or ``cache_opts`` has
            another name.
        OptionError: (``ValueError``) If one is out of its bounds.
        DeviceError: (``ValueError``) If ``output_device`` is not there.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **BatchedLM.option_checks,
        "cache_size": integer(0),
        "cache_opts": optional(check_cache_opts),
    }

    library_opts: ClassVar[str] = "engine_opts"

    @shows_options(LMOptions)
    def __init__(
        self,
        engine: VLLMEngine,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        *,
        max_length: int | None = None,
        **options: Unpack[LMOptions],
    ) -> None:
        own, given = self._parted(locals())
        self._vllm = VLLMEvaluator(engine, own["output_device"], given["max_length"])
        most_rows, opts = given["cache_size"], given["cache_opts"] or {}
        rows = row_cache(most_rows, own["row_cache_bytes"], **opts)
        super().__init__(engine.tokenizer, self._vllm, row_cache=rows, **own)
        self._pictures = VLLMPictureReader(engine, self.contexts)
        self._is_sampling = False

    @classmethod
    def from_name(
        cls,
        model_name: str,
        engine_opts: dict[str, Any] | None = None,
        *,
        check_rows: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Load a model with vLLM.

        The first engine of a process runs in it. A second one runs in a process of its own, and
        so does one with several workers, or where ``VLLM_ENABLE_V1_MULTIPROCESSING=1`` is set.
        A script that loads such a one guards its main part with ``if __name__ == "__main__":``.

        Args:
            model_name: A repository on the hub, a local directory, or ``"smollm2"``.
            engine_opts: For ``vllm.LLM``, such as ``dtype``, ``max_model_len``,
                ``tensor_parallel_size``, ``enable_lora``, ``gpu_memory_utilization`` (0.9),
                ``max_num_seqs``.
            check_rows: Whether rows of some contexts that are extended and forked are compared with
                those of the same ones asked whole, which takes a few short passes.
            **kwargs: For the constructor.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type; as with
                the next, nothing is loaded then.
            OptionError: (``ValueError``) If one is out of its bounds.
            MissingExtraError: (``ImportError``) If vLLM is absent, or a release that lacks
                something.
            UnsupportedModelError: (``ValueError``) If an option or the model does not go with
                sessions, or rows of forks are not those of whole contexts.
            ModelNotFoundError: (``OSError``) If there is no such model.
        """
        cls.check_options(kwargs)
        optional(mapping)("engine_opts", engine_opts)
        is_checked = switch("check_rows", check_rows)
        engine = load_engine(model_name, engine_opts or {})
        try:
            lm = cls(engine, **kwargs)
        except BaseException:
            engine.close()
            raise
        if is_checked:
            try:
                lm._call(lambda: compare_rows(lm._vllm))
            except BaseException:
                lm.close()
                raise
        return lm

    # ---------------------------------------------------------------- samples

    async def _samples(
        self, prompts: list[Context], lora_name: str | None, progress: bool, **options: Any
    ) -> list[Sampled]:
        if 0 < options["temperature"] < LEAST_TEMPERATURE:
            raise OptionError(
                f"temperature={options['temperature']}: vLLM samples at none between 0 and "
                f"{LEAST_TEMPERATURE}; generate and draw_next_token do"
            )
        queries = [self._query(prompt, lora_name) for prompt in prompts]
        if options["max_tokens"] == 0:
            return [Sampled([], "length") for _ in prompts]
        assert self.max_length is not None
        completions = [
            Completion(query, **options, stream=stream, max_length=self.max_length)
            for stream, query in enumerate(queries)
        ]
        with progress_bar(len(completions), progress) as bar:
            return await self._sampled(completions, lambda _: bar.update())

    async def _sampled(
        self, completions: Sequence[Completion], when_ended: Callable[[Any], None]
    ) -> list[Sampled]:
        """Return the ids sampled for each completion; stop them all if one fails."""
        self._batcher.call_soon(lambda: self._begin_samples(completions))
        futures = [asyncio.wrap_future(completion.future) for completion in completions]
        for future in futures:
            future.add_done_callback(when_ended)
        try:
            return await asyncio.gather(*futures)
        finally:
            for completion in completions:
                completion.future.cancel()

    def _begin_samples(self, completions: Sequence[Completion]) -> None:
        """Begin completions, on the thread of the engine, and keep it going while there are any."""
        known: list[Completion] = []
        for completion in completions:
            error = self._adapters.error_of(completion.prompt)
            if error is None:
                known.append(completion)
            else:
                completion.fail(error)
        self._vllm.planner.start(known, self.undefined_ids)
        if not self._is_sampling:
            self._go_on_sampling()

    def _go_on_sampling(self) -> None:
        """Make one step for the completions, and queue the next if any are left."""
        # Batches that wait go in between, and take the completions along.
        self._is_sampling = self._vllm.planner.go_on()
        if self._is_sampling:
            with contextlib.suppress(BatcherClosedError):  # whoever closes it settles what is left
                self._batcher.call_soon(self._go_on_sampling)

    def _drain(self, adapter: Adapter) -> None:
        super()._drain(adapter)
        while self._call(lambda: self._vllm.samples_of(adapter)):  # a step of them before each call
            pass

    def cleanup(self) -> None:
        """Do as ``close()``; its older name."""
        self.close()


@final
class VLLMLoader:
    """Loads a model of vLLM when it is called, in whatever process that is; it pickles.

    For a ``ProcessEvaluator`` or a ``RayEvaluator``, and so for ``AsyncReplicas`` of vLLM: each
    replica is an engine with sessions and prefix caching of its own.

    Args:
        model_name: A repository on the hub, a local directory, or ``"smollm2"``.
        engine_opts: For ``vllm.LLM``, as in ``AsyncVirtualLM.from_name``.

    Raises:
        OptionTypeError: (``TypeError``) If one is of a wrong type.
    """

    def __init__(self, model_name: str, engine_opts: Mapping[str, Any] | None = None) -> None:
        self.model_name = text("model_name", model_name)
        self.engine_opts = dict(optional(mapping)("engine_opts", engine_opts) or {})

    def __call__(self) -> VLLMEvaluator:
        """Load the model."""
        # The tokenizer is needed where the replicas are asked, and not here.
        options = {"skip_tokenizer_init": True, **self.engine_opts}
        return VLLMEvaluator(load_engine(self.model_name, options), torch.device("cpu"))


def load_engine(model_name: str, engine_opts: Mapping[str, Any]) -> VLLMEngine:
    """Load a model with vLLM, if its release can be used."""
    check_release()
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine

    path = resolve_name(model_name)
    with explained(model_name):
        check_holds(path, "config.json", "params.json")
        check_reachable(path)
        return VLLMEngine.load(path, dict(engine_opts))
