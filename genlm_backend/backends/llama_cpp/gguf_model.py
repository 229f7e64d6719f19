"""GGUFModel: a model that llama.cpp has loaded from a GGUF file, with its vocabulary."""

from __future__ import annotations

import ctypes
import threading
import weakref
from pathlib import Path
from typing import Any, Final, final

from genlm_backend.backends.bundled import BUNDLED, bundled_file
from genlm_backend.backends.llama_cpp.binding import library, log_caught
from genlm_backend.backends.loading import check_name
from genlm_backend.checks import near_names, shown
from genlm_backend.errors import (
    AdapterError,
    ModelNotFoundError,
    ModelStateError,
    OptionError,
    UnsupportedModelError,
)

_MAGIC: Final = b"GGUF"
_WHOLE_PIECE: Final = 256


@final
class GGUFModel:
    """A llama.cpp model, its vocabulary and its LoRA adapters; ``close()`` frees them."""

    def __init__(
        self, path: str | Path, num_gpu_layers: int = 0, *, vocab_only: bool = False
    ) -> None:
        self.pointer: Any = None
        self._reading = threading.Lock()
        self.path = str(path)
        _check_file(Path(self.path))
        lib = self._lib = library()
        if num_gpu_layers and not lib.llama_supports_gpu_offload():
            raise OptionError(
                f"num_gpu_layers={num_gpu_layers} needs a build of llama-cpp-python for a GPU, "
                "but this one is for the CPU"
            )
        params = lib.llama_model_default_params()
        params.n_gpu_layers, params.vocab_only = num_gpu_layers, vocab_only
        with log_caught() as errors:
            self.pointer = lib.llama_model_load_from_file(self.path.encode(), params)
        if not self.pointer:
            raise UnsupportedModelError(f"llama.cpp cannot load {self.path!r}: {_said(errors)}")
        self._freeing = weakref.finalize(self, _free, self.pointer)
        self._freeing.atexit = False
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        lib = self._lib
        if not lib.llama_model_has_decoder(self.pointer):
            raise UnsupportedModelError(f"{self.path!r} contains no language model")
        if lib.llama_model_has_encoder(self.pointer):
            raise UnsupportedModelError(
                f"{self.path!r} also contains an encoder, so the model's rows do not depend on "
                "the context alone"
            )
        self._vocab = vocab = lib.llama_model_get_vocab(self.pointer)
        self.vocab_size = int(lib.llama_vocab_n_tokens(vocab))
        if self.vocab_size < 1 or lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_NONE:
            raise UnsupportedModelError(f"{self.path!r} contains no vocabulary")
        self.num_trained = max(1, int(lib.llama_model_n_ctx_train(self.pointer)))
        self.bos_token_id = self._id(lib.llama_vocab_bos(vocab))
        self.eos_token_id = self._id(lib.llama_vocab_eos(vocab))
        # llama.cpp's own list of end tokens is not used: it includes tokens by their names alone.
        said = [self.metadata(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
        ends = {int(value) for value in said if value is not None and value.isdigit()}
        if self.eos_token_id is not None:
            ends.add(self.eos_token_id)
        self.eos_token_ids = tuple(sorted(i for i in ends if i < self.vocab_size))
        self.window = int(lib.llama_model_n_swa(self.pointer))
        self.has_states = bool(
            lib.llama_model_is_recurrent(self.pointer) or lib.llama_model_is_hybrid(self.pointer)
        )

    def _id(self, token_id: int) -> int | None:
        return token_id if 0 <= token_id < self.vocab_size else None

    # ---------------------------------------------------------------- vocabulary

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token in the middle of a text; for a special token, its name."""
        if not self._is_used(token_id):  # llama_token_to_piece would give nothing
            return self._spelling(token_id)
        size = _WHOLE_PIECE
        while True:
            buffer = ctypes.create_string_buffer(size)
            found = self._lib.llama_token_to_piece(self._vocab, token_id, buffer, size, 0, True)
            if found >= 0:
                return buffer.raw[:found]
            size = -found

    def attributes(self, token_id: int) -> int:
        """Return the attributes of a token: ``LLAMA_TOKEN_ATTR_…`` bits."""
        return int(self._lib.llama_vocab_get_attr(self._vocab, token_id))

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special: a control token or the unknown token."""
        lib = self._lib
        special = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        return bool(self.attributes(token_id) & special)

    def is_defined(self, token_id: int) -> bool:
        """Return whether an id has a token; ``[PAD…]``, a filler of converters, is no token."""
        return self._is_used(token_id) or self._spelling(token_id) != f"[PAD{token_id}]".encode()

    def _is_used(self, token_id: int) -> bool:
        return not self.attributes(token_id) & self._lib.LLAMA_TOKEN_ATTR_UNUSED

    def _spelling(self, token_id: int) -> bytes:
        return self._lib.llama_vocab_get_text(self._vocab, token_id)

    def token_ids(self, text: str, *, adds_special: bool) -> list[int]:
        """Return the token ids of a text, in which names of special tokens become these tokens."""
        data = text.encode()
        size = len(data) + 8
        with self._reading:
            if not self.pointer:
                raise ModelStateError("the model is closed, and can no longer tokenize texts")
            while True:
                ids = (ctypes.c_int32 * size)()
                found = self._lib.llama_tokenize(
                    self._vocab, data, len(data), ids, size, adds_special, True
                )
                if found >= 0:
                    return list(ids[:found])
                size = -found

    def metadata(self, key: str) -> str | None:
        """Return a metadata value of the file as text; ``None`` if the file lacks the key."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            found = self._lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, size)
            if found < 0:
                return None
            if found < size:
                return buffer.value.decode("utf-8", "replace")
            size = found + 1

    # ---------------------------------------------------------------- adapters, closing

    def adapter(self, name: str, path: str) -> Any:
        """Load and return a LoRA adapter from a GGUF file, or raise an ``AdapterError``."""
        try:
            _check_file(Path(path))
        except OSError as error:
            raise AdapterError(f"the LoRA adapter {name!r} cannot be loaded: {error}") from error
        with log_caught() as errors:
            found = self._lib.llama_adapter_lora_init(self.pointer, path.encode())
        if not found:
            raise AdapterError(
                f"llama.cpp cannot load the LoRA adapter {name!r} from {path!r}: {_said(errors)}"
            )
        return found

    def free_adapter(self, adapter: Any) -> None:
        """Free an adapter; no context may still use it."""
        self._lib.llama_adapter_lora_free(adapter)

    def close(self) -> None:
        """Free the model and its adapters; contexts must be freed first. Later calls do nothing."""
        with self._reading:
            self._freeing()
            self.pointer = None


def _check_file(path: Path) -> None:
    """Raise a ``ModelNotFoundError`` unless the file exists and begins with ``GGUF``."""
    if not path.is_file():
        raise ModelNotFoundError(f"no such file: {str(path)!r}")
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC))
    if begin != _MAGIC:
        raise ModelNotFoundError(f"{str(path)!r} is no GGUF file: it begins with {begin!r}")


def _free(pointer: Any) -> None:
    with log_caught():
        library().llama_model_free(pointer)


def _said(errors: list[str]) -> str:
    return "; ".join(errors) or "it gives no reason"


def resolve_file(name: str | Path) -> str:
    named = check_name(name)
    path = Path(named)
    if path.is_file():
        return named
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        first = [file for file in files if "-00001-of-" in file.name]
        if len(found := first or files) == 1:
            return str(found[0])
        names = shown([file.name for file in files])
        raise ModelNotFoundError(
            f"the directory {named!r} has {len(files)} GGUF files: {names}; name one of them"
            if files
            else f"the directory {named!r} has no GGUF file"
        )
    if named in BUNDLED:
        return str(bundled_file(named))
    others = [str(file) for file in path.parent.glob("*.gguf")] if path.parent.is_dir() else []
    raise ModelNotFoundError(
        f"no such file: {named!r} (fetch a file of the Hugging Face hub with "
        "huggingface_hub.hf_hub_download(repository, "
        f"file)){near_names(named, [*others, *BUNDLED], quoted=True)}"
    )
