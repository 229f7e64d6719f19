"""AsyncMlxLM: next-token log-probabilities of an mlx-lm model, for asyncio."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, final

from genlm_backend.backends.loading import cache_opts as check_cache_opts
from genlm_backend.backends.loading import explained, row_cache
from genlm_backend.backends.mlx.present import check_present
from genlm_backend.checks import (
    Check,
    byte_count,
    integer,
    optional,
    sequence,
    shows_options,
    switch,
    text,
)
from genlm_backend.model.batched_lm import BatchedLM, RowOptions, WholeLM

if TYPE_CHECKING:
    from genlm_backend.backends.mlx.mlx_evaluator import MlxEvaluator


@final
class AsyncMlxLM(WholeLM):
    """A language model of mlx-lm, batched and cached, on Apple silicon or on a CPU.

    Concurrent awaits become batched forward passes on one worker thread, padded if the model allows
    it. Keys and values of prefixes are kept within a budget and reused token by token; recurrent
    states, if layers have any, are kept after each queried context. Models whose caches cannot be
    reused give the same rows, but run every context whole; ``kv_reuse`` is then ``False``.
    ``add_new_lora`` takes adapters that ``mlx_lm.lora`` makes. The class needs the extra ``mlx``.

    Args:
        mlx_lm_model: The model that ``mlx_lm.load`` returns, quantised or not.
        tokenizer: A transformers tokenizer, or the one that ``mlx_lm.load`` returns.
        timeout: Seconds that the first query of a batch may wait for others.
        prefill_step_size: Maximum tokens of one context per pass; longer contexts go in chunks.
            Contexts that run whole are not divided. Default: 1,024 on a CPU, else 2,048.
        cache_size: Maximum number of rows to keep; 0 bounds them by bytes only.
        cache_opts: ``max_bytes``, which replaces ``row_cache_bytes``, and ``move_to_cpu``,
            whether to keep rows in main memory, where MLX's rows are anyway.
        batch_size: Maximum number of distinct contexts evaluated at once.
        kv_cache_bytes: Bytes of keys and values to keep, allocated as they are used; 0 keeps none.
            Default: on the CPU a quarter of the free memory, up to 4 GiB; on Metal half of the
            unused part of the recommended working set.
        state_cache_bytes: The part of ``kv_cache_bytes`` for recurrent states, for a model that
            has them (Mamba, Gated DeltaNet, …). Default: half of the bytes, or all if no layer
            attends.
        max_length: The longest context to accept. Default: the length in the model's arguments, if
            they have one.
        eos_token_ids: The ids that end a text in a call that gives none. Default: the tokenizer's;
            the tokenizer of ``mlx_lm.load`` has the model's.
        **options: ``row_cache_bytes``, ``output_device`` and ``self_check``, as for ``BatchedLM``.

    Raises:
        MissingExtraError: (``ImportError``) Without MLX.
        OptionTypeError: (``TypeError``) If an option is of a wrong type.
        OptionError: (``ValueError``) If an option is out of its bounds.
        UnsupportedModelError: (``ValueError``) If the model is no language model of mlx-lm.
        TokenizerDecodeError: (``ValueError``) If the bytes of some token are unknown.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **BatchedLM.option_checks,
        "kv_cache_bytes": optional(byte_count),
        "state_cache_bytes": optional(byte_count),
        "prefill_step_size": optional(integer(1)),
        "cache_size": integer(0),
        "cache_opts": optional(check_cache_opts),
        "eos_token_ids": optional(sequence(integer(), "a collection of token ids")),
    }

    @shows_options(RowOptions)
    def __init__(
        self,
        mlx_lm_model: Any,
        tokenizer: Any,
        timeout: float = 0.02,
        prefill_step_size: int | None = None,
        cache_size: int = 0,
        cache_opts: Mapping[str, Any] | None = None,
        *,
        batch_size: int = 20,
        kv_cache_bytes: int | None = None,
        state_cache_bytes: int | None = None,
        max_length: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        **options: Unpack[RowOptions],
    ) -> None:
        check_present()
        from genlm_backend.backends.mlx.mlx_evaluator import MlxEvaluator

        own, given = self._parted(locals())
        most_rows, opts = given.pop("cache_size"), given.pop("cache_opts") or {}
        rows = row_cache(most_rows, own["row_cache_bytes"], **opts)
        if type(tokenizer).__name__ == "TokenizerWrapper":  # of mlx-lm
            if eos_token_ids is None:
                given["eos_token_ids"] = tokenizer.eos_token_ids
            tokenizer = getattr(tokenizer, "_tokenizer", tokenizer)
        self._mlx: MlxEvaluator = MlxEvaluator(mlx_lm_model, **given)
        super().__init__(tokenizer, self._mlx, row_cache=rows, **own)

    @classmethod
    def from_name(
        cls,
        model_name: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        allow_untested: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            model_name: A repository on the hub or a local directory, in MLX's format or
                transformers' format with safetensors; or ``"smollm2"``.
            revision: Branch, tag or commit on the hub.
            trust_remote_code: Whether code that comes with the model may run.
            allow_untested: Whether to accept a model whose family or settings no test compares with
                transformers, or with settings that mlx-lm ignores. Its rows may differ from
                ``AsyncTransformer``'s.
            **kwargs: Options of the constructor.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type.
            OptionError: (``ValueError``) If an option is out of its bounds.
            ModelNotFoundError: (``OSError``) If there is no such model, or no weights that MLX
                reads.
            UnsupportedModelError: (``ValueError``) If mlx-lm does not know its architecture, or it
                needs ``allow_untested``.
            MissingExtraError: (``ImportError``) If an extra is needed and absent.
        """
        cls.check_options(kwargs)
        is_trusted = switch("trust_remote_code", trust_remote_code)
        named = optional(text)("revision", revision)
        is_allowed = switch("allow_untested", allow_untested)
        check_present()
        from genlm_backend.backends.mlx.mlx_loader import MlxLoader

        loader = MlxLoader(str(model_name), named, is_trusted, is_allowed)
        tokenizer = loader.tokenizer()
        with explained(model_name):
            model = loader.model()
        given: dict[str, Any] = {"eos_token_ids": loader.ends(), **kwargs}
        return cls(model, tokenizer, **given)

    @property
    def model(self) -> Any:
        """The ``mlx_lm_model`` that was passed; ``None`` after ``close()``."""
        return self._mlx.model
