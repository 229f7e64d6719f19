"""smc: sequential Monte Carlo over texts, by a group of particles."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from genlm_backend.checks import (
    check_names,
    function,
    instance,
    integer,
    listed,
    mapping,
    number,
    optional,
    shown,
    switch,
)
from genlm_backend.errors import OptionError, OptionTypeError
from genlm_backend.generation.constraint import Constraint
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.particles.masks import to_array
from genlm_backend.particles.particle_group import Draws, ParticleGroup
from genlm_backend.queries.context import Context
from genlm_backend.queries.query import TokenIds, check_known_ids
from genlm_backend.readouts.draw import Allowed, PackedMask, packed_mask
from genlm_backend.resampling import Scheme, log_mean, scheme_of
from genlm_backend.runtime.blocking import blocking, in_form, is_blocking
from genlm_backend.runtime.progress import progress_bar
from genlm_backend.runtime.together import together

Twist = Callable[[tuple[int, ...]], float | Awaitable[float]]
"""Function from a text's token ids to the logarithm of a factor of the text's weight."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class WeightedTexts:
    """Weighted texts, and an estimate of the normalising constant of their distribution.

    Attributes:
        texts: The text of each particle, without the prompt and special tokens.
        token_ids: The token ids of each text, including any token that ended it.
        log_weights: The log-weight of each text, ``-inf`` for a weight of 0: float64 ``[texts]``.
        log_z: The logarithm of the estimated normalising constant: the probability that a text of
            the model is allowed, times the mean of ``exp(twist)`` over allowed texts.
        log_z_error: Standard error of ``log_z``, from the spread over repeats; NaN for one repeat,
            or if all weights are 0.
        ess: Each repeat's effective sample size, before resampling: float64 ``[steps, repeats]``.
        group: The particles, one group per repeat.
    """

    texts: list[str]
    token_ids: list[list[int]]
    log_weights: NDArray[np.float64]
    log_z: float
    log_z_error: float
    ess: NDArray[np.float64]
    group: ParticleGroup

    @property
    def weights(self) -> NDArray[np.float64]:
        """The normalised weights; all are 0 if each log-weight is ``-inf``: float64 ``[texts]``."""
        largest = self.log_weights.max()
        if largest == -math.inf:
            return np.zeros(len(self.texts))
        weights = np.exp(self.log_weights - largest)
        return weights / weights.sum()

    def most_common(self, n: int | None = None) -> list[tuple[str, float]]:
        """Return up to ``n`` distinct texts (default: all) with total weights, largest first."""
        totals = dict[str, float]()
        for text, weight in zip(self.texts, self.weights.tolist(), strict=True):
            if weight:
                totals[text] = totals.get(text, 0.0) + weight
        return sorted(totals.items(), key=itemgetter(1), reverse=True)[:n]

    def __repr__(self) -> str:
        best = ", ".join(f"{text!r}: {weight:.3f}" for text, weight in self.most_common(3))
        error = "" if math.isnan(self.log_z_error) else f" ± {self.log_z_error:.2g}"
        return f"<WeightedTexts of {len(self.texts)}, log Z = {self.log_z:.4g}{error}; {best}, …>"


async def smc(
    lm: AsyncLM,
    prompt: str | TokenIds,
    n: int = 100,
    *,
    max_tokens: int = 50,
    constraint: Constraint | None = None,
    allowed: Allowed | None = None,
    twist: Twist | None = None,
    proposal: Mapping[str, Any] | None = None,
    ends: Collection[int | str] | str | None = None,
    threshold: float = 0.5,
    scheme: str | Scheme = "systematic",
    repeats: int = 1,
    seed: int | None = None,
    lora_name: str | None = None,
    ahead: bool = False,
    progress: bool = False,
) -> WeightedTexts:
    """Sample weighted texts by sequential Monte Carlo.

    The weighted texts represent the model's distribution over allowed texts, times ``exp(twist)``.
    Each token multiplies its particle's weight by the token's probability under the model, divided
    by that under the proposal. If few particles have most of the weight, copies of them replace
    others (Doucet and Johansen, 2009, "A tutorial on particle filtering and smoothing").

    Args:
        lm: The model. It computes the distinct contexts of a step in batches of ``batch_size``.
        prompt: The prompt: a text or token ids.
        n: Number of particles of each repeat.
        max_tokens: Tokens of a text, at most. A text of this length that has not ended keeps its
            weight, but with a constraint its weight is 0.
        constraint: The constraint on the whole text, copied for each particle. It decides which
            token ends a text.
        allowed: Tokens that may be drawn at every step, as for ``draw_next_token``.
        twist: Function from a tuple of a text's token ids so far to the logarithm of a factor of
            its weight; ``-inf`` only if no continuation is possible. Each step calls it once per
            particle that drew a token. If it is a coroutine function, such as one made by
            ``batched``, a step awaits its calls concurrently.
        proposal: Options of ``ParticleGroup.draw`` (``temperature``, ``top_k``, ``top_p``,
            ``min_p``), such as ``{"temperature": 1.5}``. Tokens that they exclude are never drawn.
        ends: Token ids that end a text, or strings: ``"."`` stands for all tokens that end with it.
            If there are strings, the ``eos_token_ids`` of the model, which are the default, end
            texts too. Not with a constraint.
        threshold: Resample a repeat when its effective sample size is below this share of ``n``;
            see ``ParticleGroup.resample``.
        scheme: The resampling scheme; see ``genlm_backend.resampling``.
        repeats: Number of independent runs, which share passes; ``log_z_error`` needs several.
        seed: Seed of all random numbers; ``None`` for a fresh one.
        lora_name: The LoRA adapter to use.
        ahead: Run the next forward pass while ``twist`` is awaited; see ``ParticleGroup.draw``. Not
            in ``smc_sync``.
        progress: Show a progress bar of the steps.

    Raises:
        OptionTypeError: (``TypeError``) If an option has a wrong type.
        OptionError: (``ValueError``) If an option is out of its bounds.
        ContextError: (``ValueError``) If the prompt is empty or too long.
        Exception: Any error of ``ParticleGroup.draw`` or of ``twist``.
    """
    instance(AsyncLM, "an AsyncLM")("lm", lm)
    optional(instance(Constraint, "a Constraint"))("constraint", constraint)
    length = integer(1)("max_tokens", max_tokens)
    num_repeats, count = integer(1, 1 << 20)("repeats", repeats), integer(1)("n", n)
    share, chosen = number(0, 1)("threshold", threshold), scheme_of(scheme)
    if constraint is not None and ends is not None:
        raise OptionError("pass constraint or ends, not both: the constraint decides how texts end")
    factor = optional(function)("twist", twist)
    is_early = switch("ahead", ahead)
    options = mapping("proposal", {} if proposal is None else proposal)
    check_names(options, ("temperature", "top_k", "top_p", "min_p"), "option of proposal")
    bits = packed_mask(allowed, len(lm.byte_vocab))
    mask = None if bits is None else PackedMask(bits, len(lm.byte_vocab))
    ending, num_steps = np.array(sorted(_end_ids(lm, ends)), np.int64), 0
    start = prompt if isinstance(prompt, (str, Context)) else lm.contexts.of(prompt)
    group = lm.particles([start] * num_repeats, count, seed=seed, lora_name=lora_name)
    own, sizes = await in_form(group), list[NDArray[np.float64]]()
    log_twists = np.zeros(len(group))
    states = None if constraint is None else [constraint.fork() for _ in range(len(group))]
    with progress_bar(length, switch("progress", progress)) as bar:
        while num_steps < length and group.is_active.any():
            masks: Any = mask if states is None else states
            if states is not None and mask is not None:
                active = np.flatnonzero(group.is_active).tolist()
                own_masks = zip(active, Constraint.masks([states[i] for i in active]), strict=True)
                masks = [None] * len(states)
                for i, each in own_masks:
                    masks[i] = each & mask
            is_ahead = is_early and num_steps + 1 < length
            draws = await own.draw(allowed=masks, ahead=is_ahead, **options)
            group.append(draws.token_ids)
            group.reweight(draws.log_increments)
            group.finish(_ended(draws, states, ending))
            if factor is not None:
                now = await _twists(factor, group, draws)
                with np.errstate(invalid="ignore"):
                    group.reweight(np.where(draws.token_ids >= 0, now - log_twists, 0.0))
                log_twists = np.where(draws.token_ids >= 0, now, log_twists)
            num_steps += 1
            bar.update()
            sizes.append(group.ess)
            if num_steps < length:  # else the copies would draw no token
                ancestors = group.resample(share, chosen)
                log_twists = log_twists[ancestors]
                if states is not None and group.resampled.any():
                    states = [states[i].fork() for i in ancestors.tolist()]
    if states is not None:
        group.reweight(np.where(group.is_done, 0.0, -math.inf))
    log_z = group.log_z
    return WeightedTexts(
        texts=group.texts(),
        token_ids=group.token_ids(),
        log_weights=group.log_weights,
        log_z=log_mean(log_z),
        log_z_error=_error(log_z),
        ess=np.array(sizes).reshape(-1, num_repeats),
        group=group,
    )


smc_sync = blocking(smc, "texts")


def _end_ids(lm: AsyncLM, ends: Any) -> frozenset[int]:
    """Return the ids of the tokens that end a text; see ``smc``."""
    if ends is None:
        return lm.eos_token_ids
    given = [ends] if isinstance(ends, (str, int)) else listed("ends", ends)
    kinds = (str, int, np.integer)
    wrong = [end for end in given if type(end) is bool or not isinstance(end, kinds)]
    if wrong or "" in given:
        raise OptionError(f"ends must be ids or non-empty strings, got {shown(wrong or given)}")
    ids = {int(end) for end in given if not isinstance(end, str)}
    check_known_ids("ends", ids, len(lm.byte_vocab))
    for end in (end.encode() for end in given if isinstance(end, str)):
        found = {i for i, token in enumerate(lm.byte_vocab) if bytes(token).endswith(end)}
        if not found:
            raise OptionError(f"ends has {end.decode()!r}, but no token ends with it")
        ids |= found | lm.eos_token_ids
    return frozenset(ids)


def _ended(
    draws: Draws, states: list[Constraint] | None, ends: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Advance any constraints by the draws; return which particles end: bool ``[particles]``."""
    if states is None:
        return np.isin(draws.token_ids, ends)
    for state, token_id in zip(states, draws.token_ids.tolist(), strict=True):
        if token_id >= 0:
            state.advance(token_id)
    return np.array([state.is_ended for state in states], np.bool_)


async def _twists(
    twist: Callable[[tuple[int, ...]], Any], group: ParticleGroup, draws: Draws
) -> NDArray[np.float64]:
    """Return each particle's twist, 0 for one that drew no token: float64 ``[particles]``."""
    ids, chosen = group.token_ids(), np.flatnonzero(draws.token_ids >= 0)
    values = [twist(tuple(ids[i])) for i in chosen.tolist()]
    if any(map(inspect.isawaitable, values)):
        if await is_blocking():
            for value in filter(inspect.iscoroutine, values):
                value.close()
            raise OptionTypeError("twist returned an awaitable: await smc(…) instead of smc_sync")
        values = await together(values)
    found = np.zeros(len(ids))
    given = to_array("the values of twist", values)
    if given.dtype.kind not in "fiu" or given.ndim != 1:
        raise OptionTypeError(f"twist must return numbers, got {shown(values)}")
    if not (given < math.inf).all():  # false for NaN too
        raise OptionError(f"twist must return finite numbers or -inf, got {given.max()}")
    found[chosen] = given
    return found


def _error(log_z: NDArray[np.float64]) -> float:
    """Return the standard error of the log of the mean of ``exp(log_z)``, by the delta method."""
    if len(log_z) < 2 or log_z.max() == -math.inf:
        return math.nan
    estimates = np.exp(log_z - log_z.max())
    return float(estimates.std(ddof=1) / estimates.mean() / math.sqrt(len(estimates)))
