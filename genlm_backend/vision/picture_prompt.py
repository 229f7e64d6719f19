"""Checks of prompts with pictures, the same for whatever reads them."""

from __future__ import annotations

from collections.abc import Sequence

from genlm_backend.errors import ContextError, PictureError


def check_places(marker: str, num_places: int, num_pictures: int) -> None:
    """Raise a ``PictureError`` unless a prompt has a place for each picture.

    Args:
        marker: What marks the place of a picture in a text.
        num_places: Number of places in the prompt.
        num_pictures: Number of pictures.
    """
    if num_places != num_pictures:
        raise PictureError(
            f"the prompt must hold {marker!r} once for each picture: it has {num_places} of them, "
            f"and the number of pictures is {num_pictures}"
        )


def check_fits(token_ids: Sequence[int], max_length: int | None) -> None:
    """Raise a ``ContextError`` if a prompt with its pictures is longer than the model's maximum."""
    if max_length is not None and len(token_ids) > max_length:
        raise ContextError(
            f"the prompt and its pictures are {len(token_ids)} tokens, more than the model's "
            f"maximum of {max_length}"
        )
