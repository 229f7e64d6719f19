"""PictureReader: makes contexts of prompts with pictures, using a model's processor."""

from __future__ import annotations

import hashlib
import inspect
from array import array
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch

from genlm_backend.checks import shown
from genlm_backend.errors import OptionTypeError, PictureError
from genlm_backend.multimodal.pictures import (
    PictureRules,
    Pictures,
    bytes_of,
    check_fits,
    check_num_pictures,
    codes,
    fingerprint,
    read_image,
    read_images,
)
from genlm_backend.queries.context import Context, ContextFactory
from genlm_backend.queries.evaluator import Evaluator
from genlm_backend.tokenization.bos import without_bos

_OF_TEXT: Final = frozenset({"input_ids", "attention_mask", "labels"})
"""Entries of a processor's output that do not describe pictures."""


class _Read(NamedTuple):
    """Token ids and other inputs that a processor made from a prompt with pictures."""

    token_ids: list[int]
    inputs: dict[str, torch.Tensor]


def check_processor(name: str, processor: Any) -> Any:
    """Return ``processor`` if it is ``None`` or callable, else raise an ``OptionTypeError``."""
    if processor is not None and not callable(processor):
        raise OptionTypeError(
            f"{name} must be a processor of transformers (AutoProcessor.from_pretrained(…)), or a "
            f"function that loads it, got {shown(processor)}"
        )
    return processor


@final
class PictureReader:
    """Makes contexts with a model's processor; a function may load the processor on first use."""

    def __init__(
        self,
        given: Any,
        contexts: ContextFactory,
        image_token_id: Any,
        ask: Callable[[Callable[[Evaluator], PictureRules]], PictureRules],
    ) -> None:
        self._given, self._contexts, self._ask = given, contexts, ask
        self._image_token_id = contexts.image_token_id = image_token_id

    @cached_property
    def processor(self) -> Any:
        """The processor, loaded on first use; ``None`` for text-only models or if none is given."""
        if self._image_token_id is None:
            return None
        return self._given() if inspect.isroutine(self._given) else self._given

    @cached_property
    def _marker(self) -> str:
        """The text that marks a picture's place in a prompt; raises ``PictureError`` if unknown."""
        if self._image_token_id is None:
            raise PictureError("the model is text-only, and accepts no pictures")
        if self.processor is None:
            raise PictureError(
                "pictures need the model's processor: AsyncTransformer(hf_model, hf_tokenizer, "
                "processor=AutoProcessor.from_pretrained(…))"
            )
        marker = getattr(self.processor, "image_token", None)
        if not isinstance(marker, str) or not hasattr(self.processor, "image_processor"):
            raise PictureError(
                f"{type(self.processor).__name__} is no processor of text and pictures: load the "
                "model's processor with AutoProcessor.from_pretrained"
            )
        return marker

    @cached_property
    def _probes(self) -> tuple[_Read, _Read]:
        """Outputs of the processor for a picture with a short text, and with a longer one."""
        noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        first, second = (
            self._read(f"{self._marker} a b{rest}", [read_image(noise, 0)]) for rest in ("", " c d")
        )
        return first, second

    @cached_property
    def _of_tokens(self) -> frozenset[str]:
        """Names of the inputs that have one element for each token."""
        first, second = self._probes
        return frozenset(
            name
            for name, value in first.inputs.items()
            if value.shape == (1, len(first.token_ids))
            and second.inputs[name].shape == (1, len(second.token_ids))
        )

    @cached_property
    def _rules(self) -> PictureRules:
        ids, inputs = self._probes[0]
        return self._ask(lambda e: e.picture_rules(ids, inputs))

    def context(self, prompt: Any, images: Any, max_length: int | None = None) -> Context:
        marker = self._marker
        if isinstance(images, Mapping):
            if isinstance(prompt, str):
                raise PictureError(
                    "if images are a processor's outputs, the prompt must be their input_ids, not "
                    "a text"
                )
            ids = list(array("i", self._contexts.packed(prompt)))
            return self._of_inputs(ids, images, max_length)
        pictures = read_images(images)
        if isinstance(prompt, str):
            prompt = without_bos(self.processor.tokenizer, prompt)  # the processor adds a BOS token
            check_num_pictures(marker, prompt.count(marker), len(pictures))
            part = str(self.processor.tokenizer.convert_ids_to_tokens(self._image_token_id))
            if part != marker and part in prompt:
                raise PictureError(
                    f"the prompt contains {part!r}, the token for a part of a picture: mark the "
                    f"place of a whole picture with {marker!r}"
                )
            if not pictures:
                return self._contexts.of(self.processor.tokenizer(prompt)["input_ids"])
            read = self._read(prompt, pictures)
        else:
            if pictures:
                raise PictureError(
                    "pictures need a text, or the ids that the processor returned: inputs = "
                    'lm.processor(text=[text], images=[pictures], return_tensors="pt"); '
                    'lm.context(inputs["input_ids"][0], images=inputs)'
                )
            return self._contexts.of(prompt)
        check_fits(read.token_ids, max_length)
        prints = [fingerprint(picture) for picture in pictures]
        return self._context(read, prints, self._counts(pictures))

    def _of_inputs(
        self, ids: list[int], inputs: Mapping[str, Any], max_length: int | None
    ) -> Context:
        """Return the context of token ids and inputs that the processor returned."""
        given = {n: value for n, value in inputs.items() if n not in _OF_TEXT}
        if not all(isinstance(value, torch.Tensor) for value in given.values()):
            raise PictureError(
                'outputs of a processor must be tensors (return_tensors="pt"), '
                f"got {shown(dict(inputs))}"
            )
        if self._image_token_id not in ids:
            raise PictureError(
                f"the token ids contain no image token {self._image_token_id}: pass them as the "
                "processor returned them"
            )
        known = self._probes[0].inputs
        if given.keys() != known.keys():
            raise PictureError(
                f"images must be just what {type(self.processor).__name__} returns for pictures, "
                f"{', '.join(map(repr, sorted(known)))}, got "
                f"{', '.join(map(repr, sorted(given))) or 'nothing'}"
            )
        for name in self._of_tokens:
            if given[name].shape != (1, len(ids)):
                raise PictureError(
                    f"{name} must have one element for each of {len(ids)} token ids, shape "
                    f"[1, {len(ids)}], got {list(given[name].shape)}"
                )
        given = {name: value.detach().clone() for name, value in given.items()}
        check_fits(ids, max_length)
        digest = hashlib.sha256()
        for name in sorted(given):
            digest.update(f"{name} {given[name].shape}".encode() + bytes_of(given[name]))
        counts = [ids.count(self._image_token_id)]
        return self._context(_Read(ids, given), [digest.digest()], counts)

    def _read(self, text: str, pictures: list[Any]) -> _Read:
        try:
            made = self.processor(text=[text], images=[pictures], return_tensors="pt")
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise PictureError(
                f"{type(self.processor).__name__} cannot read these pictures: {error}"
            ) from error
        inputs = {
            name: value
            for name, value in made.items()
            if name not in _OF_TEXT and isinstance(value, torch.Tensor)
        }
        return _Read(made["input_ids"][0].tolist(), inputs)

    # ---------------------------------------------------------------- making a context

    def _counts(self, pictures: list[Any]) -> list[int]:
        """Return how many image tokens each picture gets if read alone; ``[]`` for one picture."""
        if len(pictures) == 1:
            return []
        alone = (self._read(self._marker, [picture]).token_ids for picture in pictures)
        return [ids.count(self._image_token_id) for ids in alone]

    def _context(self, read: _Read, prints: list[bytes], counts: list[int]) -> Context:
        """Return a context in which ids from pictures' fingerprints replace the image tokens."""
        ids = read.token_ids
        rules, values = self._rules, np.array(ids, np.int32)
        self._contexts.packed([i for i in ids if i != self._image_token_id])
        (parts,) = np.nonzero(values == self._image_token_id)
        # All image tokens share one fingerprint if there is one picture, if pictures get more or
        # fewer when read alone, or if two pictures are adjacent and may attend to each other.
        starts = np.cumsum(counts, dtype=np.int64)[:-1]
        is_one = sum(counts) != len(parts) or (np.diff(parts)[starts - 1] == 1).any()
        if is_one:
            prints, counts = [b"".join(prints)], [len(parts)]
        if rules.is_prompt_one:
            prints = [one + values.tobytes() for one in prints]
        packed = values.copy()
        packed[parts] = np.concatenate([codes(*pair) for pair in zip(prints, counts, strict=True)])
        num_tokens = len(ids) if rules.is_prompt_one else int(parts[-1]) + 1
        made = Pictures.of(
            ids,
            read.inputs,
            num_tokens,
            self._image_token_id,
            self._of_tokens,
            suffix=rules.suffix,
            keeps=rules.keeps,
        )
        return Context.of(self._contexts, packed.tobytes(), pictures=made)
