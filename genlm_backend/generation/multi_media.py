"""MultiMediaInfo: what a prompt begins with that is no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from genlm_backend.checks import listed
from genlm_backend.errors import GenerationConfigError, OptionTypeError


@final
@dataclass(frozen=True, slots=True, eq=False)
class MultiMediaInfo:
    """The pictures of a prompt, for the field ``mm_info`` of a ``GenerationConfig``.

    Attributes:
        images: One for each place in the prompt that the model's own token for a picture marks: PIL
            images, arrays ``[height, width, 3]`` of uint8, paths or the bytes of files.

    Raises:
        GenerationConfigError: (``ValueError``) If they are no list.
    """

    images: Sequence[Any]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "images", tuple(listed("images", self.images)))
        except OptionTypeError as error:
            raise GenerationConfigError(str(error)) from error
