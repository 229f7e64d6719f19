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

if TYPE_CHECKING:  # vllm_engine imports vLLM
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine


@final
class AsyncVirtualLM(BatchedLM):
    """A model evaluated by vLLM, whose next-token log-probabilities can be awaited.

    Each context becomes a session: a request that stays in vLLM's engine. Appended tokens extend a
    session; a fork shares its full KV blocks and usually copies a partial one. ``max_num_seqs`` and
    vLLM's blocks limit the sessions; the least recently used end first. One thread runs all passes.

    LoRA adapters need an engine with ``engine_opts={"enable_lora": True}``; one step of vLLM can
    use up to ``max_loras`` of them, and ``max_lora_rank`` bounds their rank.

    ``sample`` and ``batch_sample`` use vLLM's own sampler, so that no row leaves vLLM. A seed gives
    other draws than on the other backends. A temperature must be 0 or at least 0.01, because vLLM
    raises any value in between to 0.01.

    Args:
        engine: The engine; ``from_name`` loads one.
        cache_size: Maximum number of cached rows; 0 bounds the row cache by bytes only.
        cache_opts: ``max_bytes``, which replaces ``row_cache_bytes``, and ``move_to_cpu``,
            whether to keep rows in main memory, whatever the output device.
        max_length: The longest context to accept, in tokens. vLLM's blocks limit it too, as does
            ``max_model_len - 1`` (vLLM needs one position for the token that it samples).
        **options: ``batch_size``, ``timeout``, ``row_cache_bytes``, ``output_device`` and
            ``self_check``, as for ``BatchedLM``.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of a wrong type, or ``cache_opts`` has
            an unknown name.
        OptionError: (``ValueError``) If an option is out of its bounds.
        DeviceError: (``ValueError``) If there is no such ``output_device``.
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

        The engine runs in this process, unless another engine already does, the options ask for
        several workers or an executor other than "uni", or ``VLLM_ENABLE_V1_MULTIPROCESSING=1``
        is set. In these cases it gets its own process; scripts need ``if __name__ == "__main__":``.

        Args:
            model_name: A repository on the hub, a local directory, or ``"smollm2"``.
            engine_opts: Options of ``vllm.LLM``, such as ``dtype``, ``max_model_len``,
                ``tensor_parallel_size``, ``enable_lora``, ``max_num_seqs`` and
                ``gpu_memory_utilization`` (0.9 by default).
            check_rows: Whether to compare rows of six extended and forked contexts with rows of
                the same contexts computed without a cache, in about ten short passes.
            **kwargs: Options of the constructor.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type. Options are
                checked before the weights are loaded.
            OptionError: (``ValueError``) If an option is out of its bounds, or vLLM refuses it.
            MissingExtraError: (``ImportError``) If vLLM is absent, older than 0.30, or lacks a name
                that this backend imports.
            UnsupportedModelError: (``ValueError``) If an option or the model does not support
                sessions, or cached rows differ from rows computed without a cache.
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
                f"temperature={options['temperature']}: vLLM cannot sample at temperatures "
                f"between 0 and {LEAST_TEMPERATURE}; use generate or draw_next_token"
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
        """Return each completion's sample; after an error, cancel all unfinished completions."""
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
        """On the worker thread: start completions in the engine, and queue steps until all end."""
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
        """Run one engine step; queue the next step if any completion is unfinished."""
        # Queued batches run between two such steps; their engine steps advance completions too.
        self._is_sampling = self._vllm.planner.go_on()
        if self._is_sampling:
            with contextlib.suppress(BatcherClosedError):  # close() ends the completions
                self._batcher.call_soon(self._go_on_sampling)

    def _drain(self, adapter: Adapter) -> None:
        super()._drain(adapter)
        while self._call(lambda: self._vllm.samples_of(adapter)):  # a queued step runs first
            pass

    def cleanup(self) -> None:
        """Close the model; an older name of ``close()``."""
        self.close()


@final
class VLLMLoader:
    """A picklable callable that loads a model with vLLM in the process that calls it.

    Pass one to each ``ProcessEvaluator`` or ``RayEvaluator`` of an ``AsyncReplicas``, so that each
    replica is a vLLM engine with its own sessions and prefix cache.

    Args:
        model_name: A repository on the hub, a local directory, or ``"smollm2"``.
        engine_opts: Options of ``vllm.LLM``, as in ``AsyncVirtualLM.from_name``.
        check_rows: As in ``AsyncVirtualLM.from_name``.

    Raises:
        OptionTypeError: (``TypeError``) If an argument is of a wrong type.
    """

    def __init__(
        self,
        model_name: str,
        engine_opts: Mapping[str, Any] | None = None,
        check_rows: bool = True,
    ) -> None:
        self.model_name = text("model_name", model_name)
        self.engine_opts = dict(optional(mapping)("engine_opts", engine_opts) or {})
        self.check_rows = switch("check_rows", check_rows)

    def __call__(self) -> VLLMEvaluator:
        """Load the model; return its evaluator, which returns rows on the CPU."""
        # Only the process that makes the ``AsyncReplicas`` needs the tokenizer.
        options = {"skip_tokenizer_init": True, **self.engine_opts}
        evaluator = VLLMEvaluator(load_engine(self.model_name, options), torch.device("cpu"))
        if self.check_rows:
            try:
                compare_rows(evaluator)
            except BaseException:
                evaluator.engine.close()
                raise
        return evaluator


def load_engine(model_name: str, engine_opts: Mapping[str, Any]) -> VLLMEngine:
    """Load a model with vLLM, after checks of vLLM's release and of the model's files."""
    check_release()
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine

    path = resolve_name(model_name)
    with explained(model_name):
        check_holds(path, "config.json", "params.json")
        check_reachable(path)
        return VLLMEngine.load(path, dict(engine_opts))
