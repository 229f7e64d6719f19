"""VLLMPictureReader: turns a prompt and pictures into a context, with vLLM's preprocessing."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch

from genlm_backend.errors import PictureError
from genlm_backend.multimodal.pictures import (
    Pictures,
    check_fits,
    check_num_pictures,
    codes,
    read_images,
)
from genlm_backend.queries.context import Context, ContextFactory
from genlm_backend.tokenization.bos import without_bos

if TYPE_CHECKING:  # vllm_engine imports vLLM
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine

_FEATURES: Final = "features"
_READER: Final = "vLLM"


@final
class VLLMPictureReader:
    """Makes contexts from prompts with pictures, by vLLM's own preprocessing."""

    def __init__(self, engine: VLLMEngine, contexts: ContextFactory) -> None:
        self._engine, self._contexts = engine, contexts
        contexts.image_token_id, contexts.image_reader = engine.image_token_id, _READER

    @property
    def processor(self) -> Any:
        """The transformers processor that vLLM runs; ``None`` for a text-only model."""
        return None if self._engine.image_token_id is None else self._engine.processor

    def context(self, prompt: Any, images: Any, max_length: int | None = None) -> Context:
        processor = self.processor
        if processor is None:
            raise PictureError("the model is text-only, and accepts no pictures")
        if isinstance(images, Mapping):
            raise PictureError("vLLM runs the processor itself: pass images as a list of pictures")
        pictures, marker = read_images(images), str(processor.image_token)
        if isinstance(prompt, str):
            prompt = without_bos(processor.tokenizer, prompt)  # the processor adds BOS
            num_markers = prompt.count(marker)
        else:
            prompt = list(array("i", self._contexts.packed(prompt)))
            num_markers = prompt.count(processor.tokenizer.convert_tokens_to_ids(marker))
        check_num_pictures(marker, num_markers, len(pictures))
        if not pictures:
            is_text = isinstance(prompt, str)
            return self._contexts.of(
                processor.tokenizer(prompt)["input_ids"] if is_text else prompt
            )
        try:
            ids, features = self._engine.read(prompt, pictures)
        except Exception as error:  # from vLLM or a model's processor
            raise PictureError(f"vLLM cannot read these pictures: {error}") from error
        check_fits(ids, max_length)
        return self._context(ids, features)

    def _context(self, ids: list[int], features: list[Any]) -> Context:
        """Return a context with codes of the pictures' digests in place of the image token id."""
        image_token_id = self._engine.image_token_id
        assert image_token_id is not None
        self._contexts.packed([i for i in ids if i != image_token_id])
        values = np.array(ids, np.int32)
        parts = values == image_token_id
        for feature in features:
            start = feature.mm_position.offset
            own = np.zeros_like(parts)
            own[start : start + feature.mm_position.length] = True
            (places,) = np.nonzero(own & parts)
            values[places] = codes(feature.identifier.encode(), len(places))
        if not features or (values == image_token_id).any() or not parts.any():
            found = "no image tokens, or some that belong to none of the pictures"
            raise PictureError(f"the prompt as vLLM read it has {found}")
        num_tokens = max(f.mm_position.offset + f.mm_position.length for f in features)
        written = torch.frombuffer(bytearray(pickle.dumps(features)), dtype=torch.uint8)
        made = Pictures.of(ids, {_FEATURES: written}, num_tokens, image_token_id, reader=_READER)
        return Context.of(self._contexts, values.tobytes(), pictures=made)


def features_of(pictures: Pictures) -> list[Any]:
    """Return the features of a context's pictures, in the form that vLLM's requests take."""
    return pickle.loads(pictures.inputs[_FEATURES].numpy().tobytes())
