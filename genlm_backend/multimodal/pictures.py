"""Pictures at the beginning of a context; rules by which a model reads them; checks of prompts."""

from __future__ import annotations

import hashlib
import io
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np
import torch

from genlm_backend.checks import listed, shown
from genlm_backend.errors import ContextError, MissingExtraError, PictureError

_NEGATIVE: Final = np.int32(-(2**31))


@final
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Pictures:
    """The pictures that a context begins with, preprocessed by the model's own processor.

    They lie within the first tokens of a context, its *opening*, which is computed in one pass. A
    ``Context`` replaces the placeholder id of each picture part by a negative id, derived from a
    hash of the picture. So contexts with equal tokens and different pictures compare as different,
    and equal openings share a cached prefix.

    Attributes:
        token_ids: Ids of the opening's tokens as the model takes them, packed as 32-bit integers.
        inputs: The other arguments of the model's ``forward``, by name. Those with one element
            for each token of the opening are of shape ``[1, num_tokens]``.
        of_tokens: Names of the inputs with one element for each token.
        suffix: The value, for each token after the opening, of the inputs in ``of_tokens``.
        image_token_id: The placeholder id, the same for all parts of all pictures.
        keeps: Whether text after the opening is computed from the opening's cached keys and values;
            if not, every pass runs the whole context.
        reader: The library whose processor made the inputs, and whose models take them.
        key: Digest of the token ids, the inputs and ``suffix``.
    """

    token_ids: bytes
    inputs: Mapping[str, torch.Tensor]
    of_tokens: frozenset[str]
    image_token_id: int
    suffix: int = 0
    keeps: bool = True
    reader: str = "transformers"
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.token_ids)
        for name in sorted(self.inputs):
            digest.update(f"{name} {self.inputs[name].shape} {self.suffix}".encode())
            digest.update(bytes_of(self.inputs[name]))
        object.__setattr__(self, "key", digest.digest())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the opening."""
        return len(self.token_ids) // 4

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the token ids and inputs."""
        return len(self.token_ids) + sum(value.nbytes for value in self.inputs.values())

    def ids(self, rest: array[int]) -> array[int]:
        """Return a context's ids as the model takes them, given the ids after the opening."""
        return array("i", self.token_ids) + rest

    def shown(self, packed: array[int]) -> list[int]:
        """Return packed ids as a list, with the placeholder id in place of each negative id."""
        return [token_id if token_id >= 0 else self.image_token_id for token_id in packed]

    def inputs_for(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Return the inputs for a context of ``num_tokens`` tokens, with ``of_tokens`` padded."""
        rest = num_tokens - self.num_tokens
        return {
            name: torch.nn.functional.pad(value, (0, rest), value=self.suffix)
            if name in self.of_tokens and rest
            else value
            for name, value in self.inputs.items()
        }

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        inputs: Mapping[str, torch.Tensor],
        num_tokens: int,
        image_token_id: int,
        of_tokens: frozenset[str] = frozenset(),
        **fields: Any,
    ) -> Self:
        """Return the pictures of a prompt whose first ``num_tokens`` tokens are the opening."""
        cut = {n: value[:, :num_tokens] if n in of_tokens else value for n, value in inputs.items()}
        packed = array("i", token_ids[:num_tokens]).tobytes()
        return cls(packed, cut, of_tokens, image_token_id, **fields)


def image_token_id_of(config: Any) -> int | None:
    """Return the placeholder id in a model's config; ``None`` if the model takes no pictures."""
    if getattr(config, "vision_config", None) is None:
        return None
    found = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    return found if isinstance(found, int) else None


def codes(fingerprint: bytes, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Derive negative ids for a picture's parts from its fingerprint: int32 ``[count]``."""
    digest = hashlib.shake_256(fingerprint).digest(4 * count)
    return np.frombuffer(digest, np.int32) | _NEGATIVE


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@final
@dataclass(frozen=True, slots=True)
class PictureRules:
    """How a model computes contexts with pictures; ``Evaluator.picture_rules`` finds it out.

    Attributes:
        is_prompt_one: Whether prompt tokens attend to later ones too (PaliGemma), so that the whole
            prompt is the opening; otherwise, the opening ends with the last picture.
        suffix: The value of inputs with one element per token, for tokens after the opening.
        keeps: Whether text after the opening is computed from cached keys and values; if not, every
            pass runs the whole context.
    """

    is_prompt_one: bool = False
    suffix: int = 0
    keeps: bool = True


def check_num_pictures(marker: str, num_markers: int, num_pictures: int) -> None:
    """Raise a ``PictureError`` unless a prompt has as many markers as pictures."""
    if num_markers != num_pictures:
        raise PictureError(
            f"the prompt must contain {marker!r} once per picture, got {num_markers} "
            f"(number of pictures: {num_pictures})"
        )


def check_fits(token_ids: Sequence[int], max_length: int | None) -> None:
    """Raise a ``ContextError`` if a prompt with its pictures is longer than the model's maximum."""
    if max_length is not None and len(token_ids) > max_length:
        raise ContextError(
            f"the prompt and its pictures have {len(token_ids)} tokens, more than the model's "
            f"maximum of {max_length}"
        )


def read_images(images: Any) -> list[Any]:
    """Return pictures as PIL images in RGB."""
    if getattr(images, "ndim", None) == 3:
        raise PictureError("images must be a list of pictures, got a single picture: pass [image]")
    return [read_image(image, number) for number, image in enumerate(listed("images", images))]


def read_image(image: Any, number: int) -> Any:
    """Return a picture as a PIL image in RGB; ``number`` is its index, for error messages."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingExtraError(
            "pictures need Pillow: pip install 'genlm-backend[images]'"
        ) from error
    try:
        if isinstance(image, str) and image.startswith(("http:", "https:", "data:")):
            raise PictureError(
                f"picture {number} is a URL, which is not fetched: pass the bytes of the file"
            )
        if isinstance(image, (str, Path)):
            image = ImageOps.exif_transpose(Image.open(image))
        elif isinstance(image, (bytes, bytearray)):
            image = ImageOps.exif_transpose(Image.open(io.BytesIO(image)))
        elif hasattr(image, "__array__") and not isinstance(image, Image.Image):
            image = _of_array(np.asarray(image), number)
        if isinstance(image, Image.Image):
            return image.convert("RGB")
    except PictureError:
        raise
    except Exception as error:  # decoders and ``__array__`` may raise anything
        raise PictureError(f"picture {number} cannot be read: {error}") from error
    raise PictureError(
        f"picture {number} must be a PIL image, an array [height, width, 3] of uint8, a path or "
        f"the bytes of a file, got {shown(image)}"
    )


def _of_array(values: np.ndarray[Any, Any], number: int) -> Any:
    from PIL import Image

    if values.ndim != 3 or values.shape[2] != 3 or values.dtype != np.uint8 or not values.size:
        raise PictureError(
            f"picture {number} must be an array [height, width, 3] of uint8, got "
            f"{values.dtype} {list(values.shape)}; PIL images may be of any mode"
        )
    return Image.fromarray(values)


def fingerprint(picture: Any) -> bytes:
    """Return a digest of a PIL image's size and pixels."""
    return hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).digest()
