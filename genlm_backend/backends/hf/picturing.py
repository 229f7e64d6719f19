"""PicturingLM: the interface of a model of transformers that may read pictures."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from genlm_backend.backends.hf.picture_reader import PictureReader
from genlm_backend.checks import shown
from genlm_backend.errors import OptionTypeError, PictureError
from genlm_backend.model.context import Context
from genlm_backend.model.prefix_keeping import PrefixKeepingLM
from genlm_backend.model.query import TokenIds
from genlm_backend.vision.picture_rules import PictureRules


def check_processor(processor: Any) -> None:
    """Refuse what is neither a processor nor loads one.

    Raises:
        OptionTypeError: (``TypeError``) If it is neither.
    """
    if processor is not None and not callable(processor):
        raise OptionTypeError(
            "processor must be one of transformers, as AutoProcessor.from_pretrained(…) loads it, "
            f"got {shown(processor)}"
        )


class PicturingLM(PrefixKeepingLM):
    """A model over an evaluator that may read pictures.

    Its arguments, and the errors that making one may raise, are those of ``BatchedLM``.
    """

    _given_processor: Any

    def _sees_by(self, processor: Any) -> None:
        """Read pictures by a processor, or by what loads it when it is first needed."""
        self._given_processor = processor
        self.contexts.image_token_id = self._info.image_token_id

    @cached_property
    def processor(self) -> Any:
        """The processor of transformers that reads pictures, loaded when it is first needed.

        Its ``image_token`` is what stands for a picture in a text. ``None`` for a model that reads
        text alone, or has been given without a processor.

        Raises:
            PictureError: (``ValueError``) If there is none where the model was loaded from.
        """
        processor = self._given_processor
        if self._info.image_token_id is None:
            return None
        return processor() if inspect.isroutine(processor) else processor

    @cached_property
    def _reader(self) -> PictureReader:
        placeholder = self._info.image_token_id
        if placeholder is None:
            raise PictureError("the model reads text alone, and takes no pictures")
        processor = self.processor
        if processor is None:
            raise PictureError(
                "pictures are read by the model's own processor: AsyncTransformer(hf_model, "
                "hf_tokenizer, processor=AutoProcessor.from_pretrained(…))"
            )

        def rules_of(token_ids: list[int], inputs: Mapping[str, torch.Tensor]) -> PictureRules:
            self._before_wait()
            return self._call(lambda: self._evaluator.picture_rules(token_ids, inputs))

        return PictureReader(processor, self.contexts, placeholder, rules_of)

    def _pictured(
        self, prompt: TokenIds | str, images: Sequence[Any] | Mapping[str, Any]
    ) -> Context:
        self._batcher.check_open()
        return self._reader.context(prompt, images, self.max_length)
