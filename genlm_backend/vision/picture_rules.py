"""PictureRules: where text goes on behind the pictures of a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class PictureRules:
    """Rules of a model for pictures, as it has been asked.

    Attributes:
        is_prompt_one: Whether the tokens of a prompt see each other, those that come later too
            (PaliGemma), so that all of it goes through the model at once; otherwise that ends with
            the last picture.
        suffix: What tokens behind the opening have where the processor makes an element for each.
        keeps: Whether text is computed from kept keys and values; where not, contexts that begin
            with pictures are run whole.
    """

    is_prompt_one: bool = False
    suffix: int = 0
    keeps: bool = True
