"""Images: pictures of any kind, as the processors of models take them."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from genlm_backend.checks import listed, shown
from genlm_backend.errors import MissingExtraError, PictureError


def read_images(images: Any) -> list[Any]:
    """Return pictures as PIL has them, in RGB."""
    if getattr(images, "ndim", None) == 3:
        raise PictureError("images must be a list of pictures, got a single one: pass [image]")
    return [read_image(image, number) for number, image in enumerate(listed("images", images))]


def read_image(image: Any, number: int) -> Any:
    """Return one picture as PIL has it, in RGB; ``number`` counts them."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingExtraError(
            "pictures need Pillow: pip install 'genlm-backend[images]'"
        ) from error
    try:
        if isinstance(image, str) and image.startswith(("http:", "https:", "data:")):
            raise PictureError(f"picture {number} is a URL, which is not fetched: pass its bytes")
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
    except Exception as error:  # whatever a decoder of files, or an array's owner, raises
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
    """Return a digest of what a picture of PIL shows."""
    return hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).digest()
