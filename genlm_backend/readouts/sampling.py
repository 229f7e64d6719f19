"""Sampler, the random stream of one sampled text, and checks of sampling options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, Literal, final

import numpy as np

from genlm_backend.checks import check_names, checked, integer, optional, sequence, switch
from genlm_backend.queries.query import RowQuery, check_known_ids
from genlm_backend.readouts.draw import TEMPERATURE
from genlm_backend.readouts.sample_readout import SampleReadout


@final
class Sampled(list[int]):
    """A list of sampled token ids, with the reason why it ends.

    Args:
        token_ids: The ids.
        finish_reason: Why they end.

    Attributes:
        finish_reason: ``"eos"`` if an EOS token was sampled, which is not in the list;
            ``"length"`` at ``max_tokens``, or if the context exceeds the model's ``max_length``.
    """

    __slots__ = ("finish_reason",)

    def __init__(self, token_ids: Iterable[int], finish_reason: Literal["eos", "length"]) -> None:
        super().__init__(token_ids)
        self.finish_reason = finish_reason


@final
class Sampler:
    """The temperature and random stream of one text; makes the readouts that draw its tokens."""

    def __init__(self, temperature: float = 1.0, seed: int | None = None, stream: int = 0) -> None:
        given = checked(CHECKS, {"temperature": temperature, "seed": seed, "stream": stream})
        self.temperature: float = given["temperature"]
        # Each sampler has its own generator, so that other samplers do not change its numbers.
        self._random = np.random.default_rng(entropy_of(given["seed"], given["stream"]))

    def uniform(self) -> float:
        """Return the next random number, in [0, 1); 0 at temperature 0."""
        return self._random.random() if self.temperature else 0.0

    def drawing(self, query: RowQuery) -> SampleReadout:
        """Return a readout that draws one token with the next random number."""
        return SampleReadout(query, self.temperature, (self.uniform(),))


def entropy_of(seed: int | None, stream: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(None if seed is None else [seed, stream])


def seed_of(seed: int | None, stream: int) -> int:
    """Return a 64-bit seed from ``seed`` and ``stream``, for libraries that take one integer."""
    return int(entropy_of(seed, stream).generate_state(1, np.uint64)[0])


CHECKS: Final = {
    "temperature": TEMPERATURE,
    "seed": optional(integer(0)),
    "stream": integer(0),
    "max_tokens": integer(0),
    "eos_token_ids": sequence(integer(), "a collection of token ids"),
    "progress": switch,
}
"""Checks of the arguments of samplers and of the models' ``sample`` methods, by name."""


def check_no_others(method: str, others: Iterable[str]) -> None:
    """Raise an ``OptionTypeError`` that suggests valid options, unless ``others`` is empty."""
    options = ("max_tokens", "eos_token_ids", "temperature", "seed", "lora_name")
    hint = " generate(lm, prompt, …) accepts more"
    check_names(others, [], f"option of {method}", also=options, hint=hint)


def check_sampling(vocab_size: int, **options: Any) -> dict[str, Any]:
    given = checked(CHECKS, options)
    check_known_ids("eos_token_ids", given.get("eos_token_ids", ()), vocab_size)
    return given


def default_ends(
    own: Collection[int] | None, tokenizer: Any, is_token: Callable[[int], bool]
) -> frozenset[int]:
    """Return the EOS ids that are tokens: the model's (``own``) or, if none, the tokenizer's."""
    of_tokenizer = listed_ids(getattr(tokenizer, "eos_token_id", None))
    found = (frozenset(filter(is_token, ids)) for ids in (own, of_tokenizer) if ids is not None)
    return next(filter(None, found), frozenset())


def listed_ids(value: Any) -> tuple[int, ...] | None:
    """Return an ``eos_token_id`` (an id, several or a tensor) as a tuple; ``None`` for ``None``."""
    if value is None:
        return None
    values = value.tolist() if hasattr(value, "tolist") else value
    several: Iterable[Any] = values if isinstance(values, Iterable) else [values]
    return tuple(int(one) for one in several if isinstance(one, (int, np.integer)))


def ends_of_model(model: Any) -> tuple[int, ...] | None:
    """Return the EOS ids in a transformers model's current generation config, or ``None``."""
    return listed_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
