"""AsyncLlamaCppLM: awaited log-probabilities of a GGUF model."""

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

    All concurrent awaits become batches of llama.cpp on one worker thread, which alone uses the
    model. The keys and values of every prefix seen are kept in llama.cpp's unified cache, within a
    budget, and are reused token by token: a fork of a context copies nothing. At most 255 contexts
    that differ are kept at a time, by the number of llama.cpp's sequences; the least recently used
    ones go first, and are computed again when they are asked for. Of models with recurrent states
    (Mamba and hybrids) a context goes on from the last token behind which there is one, as it is
    behind each context that was asked. ``add_new_lora`` takes adapters in GGUF files. It needs the
    extra ``llama-cpp``.

    Args:
        model_path: The GGUF file, or the first one of a model in several files.
        batch_size: Number of distinct contexts evaluated at once: at most 127, and half as many as
            there are recurrent states.
        timeout: Seconds that the first query of a batch may wait for others.
        kv_cache_bytes: Bytes of keys and values to keep, which llama.cpp takes at once; 0 keeps
            none. Recurrent states have half of them, or all where no layer has keys. Default: those
            of 16,384 tokens, or as many as a quarter of the machine's free memory and 4 GiB hold;
            and 1 GiB of states, at most.
        kv_cache_dtype: Number format of keys and values: "float32" or "float16" (the default).
        max_length: The longest context to accept. Default: what the model was trained on, or three
            quarters of what there is room for, so that prompts can be kept beside it.
        num_threads: Number of threads of a pass, which wait for one another; fewer are faster where
            other programs take the cores. Default: as many as torch has.
        num_gpu_layers: Number of layers on a GPU, of a build of llama-cpp-python that has one; -1
            for all.
        process: Whether the model computes in a process of its own, so that it and the Python of
            callers do not wait for each other, and an assertion of llama.cpp that fails ends that
            process alone: queries are an ``EngineDiedError`` then, until ``restart()``. Its
            vocabulary is loaded here too.
        eos_token_ids: The ids that end a text where a caller names none. Default: those that the
            file says, for texts and for turns of a chat.
        **options: ``row_cache_bytes``, ``output_device`` and ``self_check``, as of ``BatchedLM``.

    Raises:
        MissingExtraError: (``ImportError``) Without llama-cpp-python.
        OptionTypeError: (``TypeError``) If an option is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or there is no memory for it.
        ModelNotFoundError: (``OSError``) If there is no such file, or it is no GGUF file.
        UnsupportedModelError: (``ValueError``) If llama.cpp does not load it, or it holds no
            language model.
        TokenizerDecodeError: (``ValueError``) If the bytes of some token cannot be known.
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
            model_name: A GGUF file, a directory that holds one, or ``"smollm2"``, whose file is
                taken as it came.
            **kwargs: For the constructor.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type.
            OptionError: (``ValueError``) If one is out of its bounds.
            ModelNotFoundError: (``OSError``) If there is no such file.
            UnsupportedModelError: (``ValueError``) If llama.cpp does not load it.
            MissingExtraError: (``ImportError``) If an extra is needed and absent.
        """
        cls.check_options(kwargs)
        library()
        return cls(resolve_file(model_name), **kwargs)
