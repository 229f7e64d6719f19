"""GGUFTokenizer: llama.cpp's tokenizer of a GGUF file, with an interface like transformers'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from genlm_backend.backends.llama_cpp.gguf_model import GGUFModel
from genlm_backend.errors import ContextError


@final
class GGUFTokenizer:
    """The vocabulary of a GGUF file, with llama.cpp's tokenization.

    It has some methods of transformers' tokenizers: those that are used most.

    Args:
        model: The loaded file. After its ``close()``, ``encode`` fails.

    Attributes:
        decoder: The bytes of each token by its id; ids without a token are left out.
        all_special_ids: The ids of special tokens.
        bos_token_id: The id that begins a text, or ``None``.
        eos_token_id: The id that ends a text, or ``None``.
        chat_template: The chat template in the file, or ``None``.
        name_or_path: Path of the file.
    """

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        ids = [i for i in range(model.vocab_size) if model.is_defined(i)]
        self.decoder = {i: model.piece(i) for i in ids}
        self.all_special_ids = [i for i in ids if model.is_special(i)]
        self._special_ids = frozenset(self.all_special_ids)
        self.bos_token_id, self.eos_token_id = model.bos_token_id, model.eos_token_id
        self.chat_template = model.metadata("tokenizer.chat_template")
        self.name_or_path = model.path

    def __len__(self) -> int:
        return self._model.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text. Names of special tokens become those tokens.
            add_special_tokens: Whether to add the special tokens of a whole text, such as BOS.
        """
        return self._model.token_ids(text, adds_special=add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens, with U+FFFD for bytes that are not UTF-8."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self.decoder.get(i, b"") for i in ids if i not in skipped).decode(
            "utf-8", "replace"
        )

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **others: Any,
    ) -> list[int] | str:
        """Return a chat rendered by the file's template.

        Args:
            conversation: Messages, each with a ``"role"`` and a ``"content"``.
            add_generation_prompt: Whether to append the beginning of an answer.
            tokenize: Whether to return token ids instead of text.
            **others: Passed to transformers' ``render_jinja_template``, except ``return_dict``.

        Raises:
            ContextError: (``ValueError``) If the file has no template.
        """
        if self.chat_template is None:
            raise ContextError(f"{self.name_or_path!r} has no chat template")
        from transformers.utils.chat_template_utils import render_jinja_template

        others.pop("return_dict", None)
        names = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        ((text, *_), *_) = render_jinja_template(
            [[dict(message) for message in conversation]],
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **{**names, **others},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def eos_token(self) -> str | None:
        """The text of the EOS token; ``None`` if there is no such token."""
        return None if self.eos_token_id is None else self.decode(self.eos_token_id)

    @property
    def bos_token(self) -> str | None:
        """The text of the BOS token; ``None`` if there is no such token."""
        return None if self.bos_token_id is None else self.decode(self.bos_token_id)
