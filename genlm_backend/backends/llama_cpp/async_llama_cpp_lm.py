"""AsyncLlamaCppLM: next-token log-probabilities of a GGUF model, for asyncio."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, final

from genlm_backend.backends.bundled import BOS_TOKEN, BUNDLED
from genlm_backend.backends.llama_cpp.binding import library
from genlm_backend.backends.llama_cpp.gguf_model import resolve_file
from genlm_backend.checks import (
    Check,
    byte_count,
    integer,
    one_of,
    optional,
    sequence,
    shows_options,
    switch,
    text,
)
from genlm_backend.model.batched_lm import BatchedLM, ProcessLM, RowOptions
from genlm_backend.remote.process_evaluator import ProcessEvaluator

if TYPE_CHECKING:
    from genlm_backend.backends.llama_cpp.llama_evaluator import LlamaEvaluator


@final
class AsyncLlamaCppLM(ProcessLM):
    """A language model in a GGUF file, evaluated by llama.cpp, batched and cached.

    Concurrent awaits are batched on one worker thread. llama.cpp's unified cache keeps the keys and
    values of prefixes within a budget, and reuses them token by token; a fork of a context shares
    them. The number of llama.cpp's sequences limits the cache to 255 distinct contexts; the least
    recently used are evicted first, and computed again on demand. With recurrent states (Mamba and
    hybrids) a context resumes from the last token whose state is kept; a state is kept after each
    queried context. ``add_new_lora`` takes adapters in GGUF files. The class needs the extra
    ``llama-cpp``.

    Args:
        model_path: The GGUF file, or the first file of a split model.
        batch_size: Maximum number of distinct contexts evaluated at once. The limit is 127 (255 if
            nothing is kept); with recurrent states, half of the kept states but at least 8 (31 if
            none is kept).
        timeout: Seconds that the first query of a batch may wait for others.
        kv_cache_bytes: Bytes of keys and values to keep, which llama.cpp allocates at once; 0 keeps
            none. Recurrent states get up to half of them, or up to all if no layer has keys.
            Default: room for 16,384 tokens, or for ``max_length`` if that is more, but at most a
            quarter of the free memory and 4 GiB; states take at most 1 GiB, unless the fewest that
            suffice take more.
        kv_cache_dtype: Number format of keys and values: "float32" or "float16" (the default).
        max_length: The longest context to accept. Default: the model's training length, but at most
            three quarters of the tokens that fit, so that prompts can be pinned too.
        num_threads: Number of threads for a pass. They wait for one another, so fewer may be faster
            if other programs use the cores. Default: torch's number of threads.
        num_gpu_layers: Number of layers on a GPU, which needs a GPU build of llama-cpp-python; -1
            for all.
        process: Whether the model runs in a process of its own, so that it and the callers' Python
            code do not wait for each other. A failed assertion of llama.cpp then ends that process
            alone: queries raise an ``EngineDiedError`` until ``restart()``. The vocabulary is
            loaded in both processes.
        eos_token_ids: The ids that end a text in a call that gives none. Default: the file's ids
            for ends of texts and of chat turns.
        **options: ``row_cache_bytes``, ``output_device`` and ``self_check``, as for ``BatchedLM``.

    Raises:
        MissingExtraError: (``ImportError``) Without llama-cpp-python.
        OptionTypeError: (``TypeError``) If an option is of a wrong type.
        OptionError: (``ValueError``) If an option is out of its bounds, or needs too much memory.
        ModelNotFoundError: (``OSError``) If there is no such file, or it is no GGUF file.
        UnsupportedModelError: (``ValueError``) If llama.cpp does not load the file, or it holds
            no language model.
        TokenizerDecodeError: (``ValueError``) If the bytes of some token are unknown.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **BatchedLM.option_checks,
        "kv_cache_bytes": optional(byte_count),
        "kv_cache_dtype": optional(one_of("float32", "float16")),
        "num_threads": optional(integer(1)),
        "num_gpu_layers": integer(-1),
        "process": switch,
        "eos_token_ids": optional(sequence(integer(), "a collection of token ids")),
    }

    @shows_options(RowOptions)
    def __init__(
        self,
        model_path: str | Path,
        batch_size: int = 20,
        timeout: float = 0.02,
        *,
        kv_cache_bytes: int | None = None,
        kv_cache_dtype: str | None = None,
        max_length: int | None = None,
        num_threads: int | None = None,
        num_gpu_layers: int = 0,
        process: bool = False,
        eos_token_ids: Collection[int] | None = None,
        **options: Unpack[RowOptions],
    ) -> None:
        own, given = self._parted(locals())
        num_layers, is_elsewhere = given.pop("num_gpu_layers"), given.pop("process")
        path = text("model_path", str(model_path) if isinstance(model_path, Path) else model_path)
        library()
        from genlm_backend.backends.llama_cpp.gguf_model import GGUFModel
        from genlm_backend.backends.llama_cpp.gguf_tokenizer import GGUFTokenizer
        from genlm_backend.backends.llama_cpp.llama_evaluator import LlamaEvaluator, load_evaluator

        model = GGUFModel(path, num_layers, vocab_only=is_elsewhere)
        try:
            tokenizer = GGUFTokenizer(model)
            if Path(path).name in [filename for *_, filename in BUNDLED.values()]:
                (tokenizer.bos_token_id,) = tokenizer.encode(BOS_TOKEN, add_special_tokens=False)
            self._llama: LlamaEvaluator | ProcessEvaluator
            if is_elsewhere:
                self._llama = ProcessEvaluator(partial(load_evaluator, path, num_layers, given))
            else:
                self._llama = LlamaEvaluator(model, **given)
        except BaseException:
            model.close()
            raise
        try:
            super().__init__(tokenizer, self._llama, **own)
        except BaseException:
            self._llama.close()
            raise

    @classmethod
    def from_name(cls, model_name: str, **kwargs: Any) -> Self:
        """Load a model.

        Args:
            model_name: A GGUF file, a directory that holds one, or ``"smollm2"``, whose quantised
                GGUF file is used as it is.
            **kwargs: Options of the constructor.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type.
            OptionError: (``ValueError``) If an option is out of its bounds.
            ModelNotFoundError: (``OSError``) If there is no such file.
            UnsupportedModelError: (``ValueError``) If llama.cpp does not load the file.
            MissingExtraError: (``ImportError``) If an extra is needed and absent.
        """
        cls.check_options(kwargs)
        library()
        return cls(resolve_file(model_name), **kwargs)
