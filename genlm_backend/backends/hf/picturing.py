"""ModelPictures: pictures of a model of transformers, whose processor may not be loaded yet."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, final

import torch

from genlm_backend.backends.hf.picture_reader import PictureReader
from genlm_backend.checks import shown
from genlm_backend.errors import OptionTypeError, PictureError
from genlm_backend.model.context import Context, Contexts
from genlm_backend.model.evaluator import Evaluator
from genlm_backend.vision.pictures import PictureRules


def check_processor(processor: Any) -> None:
    """Refuse an object that neither is a processor nor loads one."""
    if processor is not None and not callable(processor):
        raise OptionTypeError(
            "processor must be one of transformers, as AutoProcessor.from_pretrained(…) loads it, "
            f"got {shown(processor)}"
        )


@final
class ModelPictures:
    """Pictures of one model, read by its processor once that is needed."""

    def __init__(
        self,
        given: Any,
        contexts: Contexts,
        image_token_id: int | None,
        ask: Callable[[Callable[[Evaluator], PictureRules]], PictureRules],
    ) -> None:
        self._given, self._contexts, self._ask = given, contexts, ask
        self._image_token_id = contexts.image_token_id = image_token_id

    @cached_property
    def processor(self) -> Any:
        """The processor, loaded now; ``None`` for a model of text alone, or if none is given."""
        if self._image_token_id is None:
            return None
        return self._given() if inspect.isroutine(self._given) else self._given

    @cached_property
    def _reader(self) -> PictureReader:
        if self._image_token_id is None:
            raise PictureError("the model reads text alone, and takes no pictures")
        if self.processor is None:
            raise PictureError(
                "pictures are read by the model's own processor: AsyncTransformer(hf_model, "
                "hf_tokenizer, processor=AutoProcessor.from_pretrained(…))"
            )
        return PictureReader(self.processor, self._contexts, self._image_token_id, self._rules_of)

    def _rules_of(self, token_ids: list[int], inputs: Mapping[str, torch.Tensor]) -> PictureRules:
        return self._ask(lambda e: e.picture_rules(token_ids, inputs))

    def context(self, prompt: Any, images: Any, max_length: int | None = None) -> Context:
        return self._reader.context(prompt, images, max_length)
