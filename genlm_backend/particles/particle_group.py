"""ParticleGroup: many particles of one program, as arrays.

A particle is a prompt, the tokens after it and a log-weight. A group keeps these in arrays. With a
transformers or MLX model, each query of a step has up to ``batch_size`` distinct contexts.

**What a query sends.** For each distinct context, a query sends the number of its prefix's node in
the cache, its last token and its length. The model returns the draws, and the numbers of the new
nodes. If a node was evicted, its number is not found. The query is then answered from whole
contexts, which the group can make from its prompts and tokens at any time.

**Only results count.** A draw stores new node numbers, and counts as a draw, only after its result
has arrived. So after a cancelled or failed draw, the next one takes the same random numbers.

**Random numbers** come from Philox by (seed, index of the particle, number of draws so far). So a
draw depends neither on other queries of its batch nor on which particles are finished. Copies of
a particle have other indices, so that they draw differently.

**Shapes.** ``N`` particles, of which ``n`` are active, meaning neither finished nor dead; ``G``
groups; ``V`` token ids; ``R`` rows, one for each distinct context.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from genlm_backend.checks import integer, listed, number, optional, shown, switch
from genlm_backend.errors import (
    ContextError,
    EvaluationError,
    OptionError,
    OptionTypeError,
    ParticleError,
)
from genlm_backend.particles.masks import Masks, check_ids, masks_by_group, masks_of, to_array
from genlm_backend.queries.context import Context
from genlm_backend.readouts.draw import TEMPERATURE, Doubles
from genlm_backend.readouts.draw_table import Pools, SamplingFilter
from genlm_backend.readouts.particle_step import ParticleStep, StepContexts, StepResult, TableDraws
from genlm_backend.readouts.sample_readout import NO_DRAW
from genlm_backend.readouts.token_readouts import ReadoutOf, chosen_of, masses_of, top_of
from genlm_backend.resampling import Scheme, multinomial, scheme_of
from genlm_backend.runtime.blocking import blocking, in_form

Indices = NDArray[np.int64]


class ParticleModel(Protocol):
    """The part of ``AsyncLM`` that a group uses."""

    batch_size: int
    max_length: int | None
    device: torch.device | None
    byte_vocab: list[Any]
    special_ids: Any

    async def batch_read(
        self, token_ids_list: Any, readout: Any, lora_name: str | None = None
    ) -> list[Any]: ...

    async def particle_results(
        self,
        steps: Sequence[ParticleStep],
        lora_name: str | None,
        with_draws: Callable[[], list[ParticleStep]] | None = None,
    ) -> list[StepResult]: ...

    async def draws_from_rows(
        self, steps: Sequence[ParticleStep], rows: Sequence[StepResult]
    ) -> list[StepResult]: ...


class Draws(NamedTuple):
    """The next tokens of a group's ``N`` particles, in arrays ``[N]``.

    Attributes:
        token_ids: Ids of the tokens, int64; -1 for a particle that is finished, dead or *stuck*. A
            particle is stuck if no allowed token is possible.
        logprobs: Log-probabilities under the model at temperature 1, without masks and bounds:
            float64. ``-inf`` for a dead or stuck particle; 0 for any other finished one.
        log_allowed: Log-mass, for each particle, of all tokens that could be drawn: float64;
            without a token, equal to ``logprobs``.
        log_proposals: Log-probabilities with which the tokens were drawn: float64; 0 without one.
    """

    token_ids: Indices
    logprobs: Doubles
    log_allowed: Doubles
    log_proposals: Doubles

    @property
    def log_increments(self) -> Doubles:
        """Log-weights that the particles gain by these tokens: ``logprobs - log_proposals``."""
        return self.logprobs - self.log_proposals


class Rows(NamedTuple):
    """The rows of the ``R`` distinct contexts of ``N`` particles, each over ``V`` token ids.

    Attributes:
        table: Log-probabilities of the next token: float32 ``[R, V]``, on the device of the
            model's rows.
        row_of: Index of each particle's row, int64 ``[N]``; -1 for a finished or dead particle.
    """

    table: torch.Tensor
    row_of: Indices


class ParticleTop(NamedTuple):
    """The most probable next tokens of each particle; -1 and ``-inf`` if it is finished or dead.

    Attributes:
        token_ids: Their ids, the most probable first: int64 ``[N, k]``.
        logprobs: Their log-probabilities: float32 ``[N, k]``.
        log_rest: Log-mass of all other tokens: float64 ``[N]``.
    """

    token_ids: Indices
    logprobs: NDArray[np.float32]
    log_rest: Doubles


@final
class ParticleGroup:
    """Particles in one or more groups, one group per prompt; made by ``lm.particles``.

    A step is ``draw``, ``append``, ``reweight`` and, as needed, ``finish`` and ``resample``. A
    particle is *finished* once ``finish`` has marked it, and *dead* at a log-weight of ``-inf``; in
    both cases it draws no token. While a method of the group is awaited, calls that change or copy
    the group, and further awaits, raise an error. One thread at a time may use a group. In shapes,
    ``N`` is the number of particles, ``G`` of groups and ``V`` of token ids.

    Attributes:
        group_ids: Index of each particle's group: int64 ``[N]``.
        is_done: Whether each particle is finished: bool ``[N]``.
        resampled: Whether each group was resampled by the last ``resample``: bool ``[G]``.
        history: The ancestors that each ``resample`` returned: int64 ``[N]`` each.
    """

    def __init__(
        self,
        lm: Any,
        prompts: Sequence[Context],
        group_ids: Indices,
        seed: np.random.SeedSequence,
        lora_name: str | None,
    ) -> None:
        self._model: ParticleModel = lm
        self._prompts, self._lora_name = list(prompts), lora_name
        self.group_ids, size = group_ids, len(group_ids)
        self._counts = np.bincount(group_ids, minlength=len(prompts))
        self._seed, self._num_draws = seed, 0
        own, of_resampling = seed.spawn(2)
        self._key = own.generate_state(2, np.uint64)
        self._rng = np.random.default_rng(of_resampling)
        self._log_weights = np.zeros(size)
        self.is_done = np.zeros(size, np.bool_)
        self.resampled, self.history = np.zeros(len(prompts), np.bool_), list[Indices]()
        # The tokens after the prompts. A step refers to this array, so written elements must never
        # change: ``append`` writes after the lengths that the step has copied.
        self._tokens = np.zeros((size, 16), np.int32)  # [N, capacity] int32
        self._num_tokens = np.zeros(size, np.int64)
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        self._prompt_lengths = lengths[group_ids]
        last = [prompt[-1] if len(prompt) else 0 for prompt in prompts]
        self._last_tokens = np.array(last, np.int32)[group_ids]
        self._hints, self._hint_key = np.zeros(size, np.int64), None
        self._hinted_lengths = np.zeros(size, np.int64)  # context lengths when ``_hints`` was set
        known = dict[Context, int]()
        self._prompt_ids = [known.setdefault(own, i) for i, own in enumerate(prompts)]
        self._has_pictures = any(prompt.pictures is not None for prompt in prompts)
        self._is_running = self._is_drawn = False
        self._ahead: _Ahead | None = None

    def __len__(self) -> int:
        return len(self.group_ids)

    @property
    def is_active(self) -> NDArray[np.bool_]:
        """Whether each particle is neither finished nor dead: bool ``[N]``."""
        return ~self.is_done & (self._log_weights > -math.inf)

    @property
    def num_groups(self) -> int:
        """Number of groups, each with one prompt."""
        return len(self._prompts)

    def __repr__(self) -> str:
        num_done, num_dead = int(self.is_done.sum()), int((self._log_weights == -math.inf).sum())
        return (
            f"<ParticleGroup of {len(self)} particles in {self.num_groups} groups, {num_done} "
            f"finished, {num_dead} dead>"
        )

    # ---------------------------------------------------------------- weights

    @property
    def log_weights(self) -> Doubles:
        """Unnormalised log-weights: float64 ``[N]``, a copy."""
        return self._log_weights.copy()

    @property
    def log_z(self) -> Doubles:
        """Logarithm of each group's mean weight, which estimates log Z so far: float64 ``[G]``."""
        largest, sums, _ = self._sums()
        with np.errstate(divide="ignore"):
            return np.where(sums > 0, largest + np.log(sums / self._counts), -math.inf)

    @property
    def ess(self) -> Doubles:
        """Each group's effective sample size, 0 if all particles are dead: float64 ``[G]``."""
        _, sums, squares = self._sums()
        return np.divide(sums**2, squares, out=np.zeros(len(sums)), where=squares > 0)

    def _sums(self) -> tuple[Doubles, Doubles, Doubles]:
        """Return by group: largest log-weight; sums of weights relative to it, and of squares."""
        largest = np.full(self.num_groups, -math.inf)
        np.maximum.at(largest, self.group_ids, self._log_weights)
        largest[largest == -math.inf] = 0.0
        with np.errstate(under="ignore", over="ignore"):
            weights = np.exp(self._log_weights - largest[self.group_ids])
        sums = np.bincount(self.group_ids, weights, minlength=self.num_groups)
        squares = np.bincount(self.group_ids, np.square(weights), minlength=self.num_groups)
        return largest, sums.astype(np.float64), squares.astype(np.float64)

    def reweight(self, log_increments: ArrayLike) -> None:
        """Add numbers to the log-weights; ``-inf`` makes a particle dead.

        Args:
            log_increments: A number for each particle, or one for all: float ``[N]``.

        Raises:
            OptionTypeError: (``TypeError``) If they are not numbers.
            OptionError: (``ValueError``) If one is NaN or ``inf``, or the shape is wrong.
            ParticleError: (``RuntimeError``) While a method of the group is awaited.
        """
        self._check_idle()
        added = to_array("log_increments", log_increments)
        if added.dtype.kind not in "fiu":
            raise OptionTypeError(f"log_increments must be numbers, got {shown(log_increments)}")
        if added.shape not in ((), (len(self),)):
            raise OptionError(
                f"log_increments must be one number, or one for each of the {len(self)} particles; "
                f"got the shape {list(added.shape)}"
            )
        with np.errstate(over="ignore"):
            added = np.broadcast_to(added.astype(np.float64), len(self))
        wrong = np.flatnonzero(np.isnan(added) | (added == math.inf))
        if len(wrong):
            raise OptionError(
                f"log_increments[{wrong[0]}] is {added[wrong[0]]}: it must be a finite number, or "
                "-inf to make the particle dead"
            )
        self._log_weights = self._log_weights + added
        self._drop_ahead(is_wanted=self.is_active.any())

    def finish(self, is_done: ArrayLike) -> None:
        """Mark particles as finished: they keep their weight, and draw no more tokens.

        Args:
            is_done: Whether to finish each particle: bool ``[N]``. Finished ones stay finished.

        Raises:
            OptionTypeError: (``TypeError``) If ``is_done`` cannot be made an array.
            OptionError: (``ValueError``) If the array is not ``N`` bools.
            ParticleError: (``RuntimeError``) While a method of the group is awaited.
        """
        self._check_idle()
        done = to_array("is_done", is_done)
        if done.dtype != bool or done.shape != (len(self),):
            raise OptionError(
                f"is_done must be bools [{len(self)}], got {done.dtype} {list(done.shape)}"
            )
        self.is_done = self.is_done | done
        self._drop_ahead(is_wanted=self.is_active.any())

    def resample(
        self,
        threshold: float = 0.5,
        scheme: str | Scheme = "systematic",
        retained: ArrayLike | None = None,
    ) -> Indices:
        """Resample the groups whose effective sample size is low; return all ancestors.

        Particle ``i`` becomes a copy of particle ``ancestors[i]``, of the same group. If a program
        keeps state for each particle, it must copy the state in the same way. All log-weights of a
        resampled group become the logarithm of its mean weight, so that ``log_z`` does not change.
        A group without an active particle is not resampled.

        Args:
            threshold: Resample a group if its effective sample size is below this share of its
                number of particles; 0 to 1.
            scheme: A name or a function, as in ``genlm_backend.resampling.SCHEMES``.
            retained: For conditional sequential Monte Carlo, the index of one particle of each
                group, int ``[G]``. Each of these becomes its own ancestor. Only with
                ``"multinomial"``: with other schemes, other ancestors would depend on it.

        Returns:
            The index of each particle's ancestor, int64 ``[N]``; its own index if its group was
            not resampled.

        Raises:
            OptionTypeError: (``TypeError``) If an argument has a wrong type.
            OptionError: (``ValueError``) If ``threshold`` is out of its bounds, ``scheme`` is
                unknown or returns wrong indices, or ``retained`` comes with another scheme, is
                not one particle of each group, or names a dead particle beside living ones.
            ParticleError: (``RuntimeError``) Between ``draw`` and ``append``, and while a method of
                the group is awaited.
        """
        self._check_idle()
        if self._is_drawn:
            raise ParticleError(
                "resample() cannot run between draw() and append(): drawn tokens belong to the "
                "particles in their present order, so append the tokens first"
            )
        share = number(0, 1)("threshold", threshold)
        chosen = scheme_of(scheme)
        kept = self._retained(retained, chosen)
        log_z, num_left = self.log_z, np.bincount(self.group_ids, self.is_active, self.num_groups)
        is_low = (self.ess < share * self._counts) & (log_z > -math.inf) & (num_left > 0)
        ancestors, log_weights = np.arange(len(self)), self._log_weights.copy()
        for group in np.flatnonzero(is_low).tolist():
            own = np.flatnonzero(self.group_ids == group)
            found = np.asarray(chosen(log_weights[own], len(own), self._rng))
            is_fit = found.shape == own.shape and found.dtype.kind in "iu"
            if not is_fit or found.min() < 0 or found.max() >= len(own):
                raise OptionError(f"scheme must return {len(own)} integers in [0, {len(own)})")
            ancestors[own] = own[found]
            log_weights[own] = log_z[group]
        if kept is not None:
            ancestors[kept[is_low]] = kept[is_low]
        self.history.append(ancestors)
        self.resampled = is_low
        if is_low.any():
            self._log_weights = log_weights
            self._take(ancestors)
        return ancestors.copy()

    def _retained(self, retained: ArrayLike | None, scheme: Scheme) -> Indices | None:
        if retained is None:
            return None
        if scheme is not multinomial:
            raise OptionError(
                "retained needs scheme='multinomial': other schemes may draw ancestors that depend "
                "on each other, so that fixing one ancestor would bias the others"
            )
        kept = to_array("retained", retained)
        is_fit = kept.dtype.kind in "iu" and kept.shape == (self.num_groups,)
        is_fit = is_fit and bool(((kept >= 0) & (kept < len(self))).all())
        if not is_fit or (self.group_ids[kept] != np.arange(self.num_groups)).any():
            raise OptionError(
                f"retained must have one index for each of the {self.num_groups} groups, in order: "
                f"the index of one of its particles; got {shown(retained)}"
            )
        is_dead = (self._log_weights[kept] == -math.inf) & (self.log_z > -math.inf)
        if is_dead.any():
            raise OptionError(f"retained has particle {kept[is_dead][0]}, whose weight is zero")
        return kept.astype(np.int64)

    def _take(self, indices: Indices) -> None:
        """Make each particle ``i`` a copy of particle ``indices[i]``, except for its log-weight."""
        self.is_done, self._tokens = self.is_done[indices], self._tokens[indices]
        self._num_tokens, self._hints = self._num_tokens[indices], self._hints[indices]
        self._last_tokens = self._last_tokens[indices]
        self._hinted_lengths = self._hinted_lengths[indices]
        if self._ahead is not None:
            self._ahead = self._ahead._replace(row_of=self._ahead.row_of[indices])

    # ---------------------------------------------------------------- tokens

    def append(self, token_ids: ArrayLike) -> None:
        """Append one token to each particle, such as the token that was drawn for it.

        Args:
            token_ids: Ids, int ``[N]``; -1 appends no token.

        Raises:
            OptionTypeError: (``TypeError``) If they are not integers.
            OptionError: (``ValueError``) If an id is outside the vocabulary, or the shape is wrong.
            ParticleError: (``RuntimeError``) While a method of the group is awaited.
        """
        self._check_idle()
        ids = check_ids("token_ids", token_ids, len(self), len(self._model.byte_vocab))
        if self._num_tokens.max(initial=0) == self._tokens.shape[1]:
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)], 1)
        own = np.flatnonzero(ids >= 0)
        self._tokens[own, self._num_tokens[own]] = ids[own]
        self._num_tokens = self._num_tokens + (ids >= 0)
        self._last_tokens = np.where(ids >= 0, ids, self._last_tokens)
        self._is_drawn = False
        if self._ahead is not None:
            self._ahead = self._ahead.appended(ids)

    def token_ids(self) -> list[list[int]]:
        """Return the ids of the tokens after each particle's prompt."""
        sizes = self._num_tokens.tolist()
        return [row[:size].tolist() for row, size in zip(self._tokens, sizes, strict=True)]

    def texts(self) -> list[str]:
        """Return the text after each particle's prompt, without special tokens."""
        vocab, special = self._model.byte_vocab, self._model.special_ids
        parts = ((bytes(vocab[i]) for i in ids if i not in special) for ids in self.token_ids())
        return [b"".join(own).decode(errors="replace") for own in parts]

    def contexts(self) -> list[Context]:
        """Return each particle's context: its prompt and its tokens."""
        return list(map(self._contexts_of(np.arange(len(self))).context, range(len(self))))

    def __getitem__(self, indices: Any) -> ParticleGroup:
        """Return a new group of copies of chosen particles, with random numbers of its own.

        Args:
            indices: A NumPy index: a slice, an array of integers, or bools ``[N]``.
        """
        self._check_idle()
        chosen = np.atleast_1d(np.arange(len(self))[indices])
        numbers, group_ids = np.unique(self.group_ids[chosen], return_inverse=True)
        prompts = [self._prompts[i] for i in numbers.tolist()]
        seed = self._seed.spawn(1)[0]
        group = ParticleGroup(self._model, prompts, group_ids, seed, self._lora_name)
        group.is_done, group._tokens = self.is_done[chosen], self._tokens[chosen]
        group._num_tokens, group._hints = self._num_tokens[chosen], self._hints[chosen]
        group._last_tokens, group._hint_key = self._last_tokens[chosen], self._hint_key
        group._log_weights = self._log_weights[chosen]
        group._hinted_lengths = self._hinted_lengths[chosen]
        return group

    # ---------------------------------------------------------------- awaits

    async def draw(
        self,
        *,
        allowed: Any = None,
        allowed_by_group: Any = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        uniforms: ArrayLike | None = None,
        ahead: bool = False,
    ) -> Draws:
        """Draw a token for each active particle; ``append`` the tokens to move on.

        Equal contexts are computed once, and a token is drawn for each of their particles. Up to
        rounding, the tokens are those that ``draw_next_token`` draws by the same random numbers. A
        cancelled or failed draw does not count: the next one takes the same random numbers.

        Args:
            allowed: The tokens that may be drawn: one mask for all particles (bools ``[V]``, a
                ``PackedMask`` or token ids in an array or set); bools ``[N, V]``; a list with a
                mask, a ``Constraint`` or ``None`` for each particle; or a function without
                arguments that returns one of these. It is called once, on the caller's thread:
                after the pass if ``ahead`` started the pass; during the pass if ``draw`` is awaited
                on a transformers or MLX model in this process; else before the pass. Constraints in
                equal states share a mask.
            allowed_by_group: Instead of ``allowed``, the tokens for each group: bools ``[G, V]``.
            temperature: As for ``draw_next_token``.
            top_k: As for ``draw_next_token``.
            top_p: As for ``draw_next_token``.
            min_p: As for ``draw_next_token``.
            uniforms: Numbers in [0, 1) in place of the group's random numbers: float ``[N]``.
            ahead: Start the forward pass of the drawn tokens at once, for the next ``draw``, so
                that it runs while the program awaits a critic, for example. The pass stays valid
                after ``resample`` and ``finish``. If an active particle gets another token or none,
                the next ``draw`` takes a new pass. Later changes to adapters or model weights do
                not affect a pass that has started. Not in ``draw_sync``: it needs an event loop.

        Raises:
            OptionTypeError: (``TypeError``) If an argument has a wrong type.
            OptionError: (``ValueError``) If an argument is out of its bounds or has a wrong shape,
                or if ``draw_sync`` gets ``ahead=True``.
            ContextError: (``ValueError``) If a context is empty or longer than the model's maximum.
            ParticleError: (``RuntimeError``) While another method of the group is awaited.
            EvaluationError: (``RuntimeError``) If the row of a particle is NaN.
            Exception: Any error of ``next_token_logprobs``.
        """
        with self._running():
            points = self._uniforms(uniforms)
            divisor = TEMPERATURE("temperature", temperature)
            bounds = _bounds(top_k, top_p, min_p)
            active, is_ahead = self._active(), switch("ahead", ahead)
            lm, found = await in_form(self._model), np.empty((len(active), 5))
            if is_ahead and lm is not self._model:
                raise OptionError("ahead=True needs an event loop: await draw(…) or smc(…)")
            rows = await self._rows_ahead(active) if lm is self._model else None
            if rows is None:
                first, row_of = self._distinct(active)
                steps = self._steps(active[first])
            else:
                assert self._ahead is not None
                steps, row_of = self._ahead.steps, self._ahead.row_of[active]
            places = list[Indices]()
            is_late = callable(allowed) and not hasattr(allowed, "state_key")

            def with_draws() -> list[ParticleStep]:
                given = allowed() if is_late else allowed
                masks = self._masks(given, allowed_by_group, active)
                plan = _Plan(divisor, bounds if divisor else None, masks, points[active])
                made, places[:] = plan.with_draws(steps, row_of)
                return made

            if rows is not None:
                results = await lm.draws_from_rows(with_draws(), rows)
            elif is_late:
                results = await lm.particle_results(steps, self._lora_name, with_draws)
            else:
                steps = with_draws()
                results = await lm.particle_results(steps, self._lora_name) if steps else []
            for result, own in zip(results, places, strict=True):
                found[own] = result.values
            draws = self._draws(active, found)
            self._keep_hints(active, row_of, results)
            await self._start_ahead(draws.token_ids, active, row_of, is_ahead)
            self._count_draw()
            return draws

    draw_sync = blocking(draw, "draws")

    async def logprobs(self) -> Rows:
        """Return the rows of the active particles' distinct contexts.

        Raises:
            Exception: Any error of ``draw``.
        """
        with self._running():
            active = self._active()
            first, row_of = self._distinct(active)
            lm = await in_form(self._model)
            steps = self._steps(active[first])
            results = await lm.particle_results(steps, self._lora_name) if steps else []
            self._keep_hints(active, row_of, results)
            return self._rows([result.values for result in results], active, row_of)

    logprobs_sync = blocking(logprobs, "rows")

    async def top(self, k: int) -> ParticleTop:
        """Return the ``k`` most probable next tokens of each particle; see ``next_token_top``.

        Raises:
            Exception: Any error of ``draw``, or of ``next_token_top``.
        """
        found, row_of = await self._read(top_of(k, len(self._model.byte_vocab)))
        width = len(found[0].token_ids) if found else k
        ids = _spread([own.token_ids.numpy() for own in found], row_of, -1, (width,), np.int64)
        logprobs = [own.logprobs.numpy() for own in found]
        of_top = _spread(logprobs, row_of, -math.inf, (width,), np.float32)
        rest = _spread([own.log_rest for own in found], row_of, -math.inf, (), np.float64)
        return ParticleTop(ids, of_top, rest)

    top_sync = blocking(top, "tokens")

    async def logprobs_of(self, token_ids: Any) -> NDArray[np.float32]:
        """Return the log-probabilities of chosen next tokens: float32 ``[N, len(token_ids)]``.

        Finished and dead particles have ``-inf``; see ``next_token_logprobs_of``.

        Raises:
            Exception: Any error of ``draw``, or of ``next_token_logprobs_of``.
        """
        found, row_of = await self._read(chosen_of(token_ids, len(self._model.byte_vocab)))
        rows = [own.numpy() for own in found]
        return _spread(rows, row_of, -math.inf, (len(rows[0]) if rows else 0,), np.float32)

    logprobs_of_sync = blocking(logprobs_of, "numbers")

    async def log_masses(self, groups: Sequence[Any]) -> Doubles:
        """Return the log-masses of groups of next tokens: float64 ``[N, len(groups)]``.

        Finished and dead particles have ``-inf``; see ``next_token_log_masses``.

        Raises:
            Exception: Any error of ``draw``, or of ``next_token_log_masses``.
        """
        found, row_of = await self._read(masses_of(groups, len(self._model.byte_vocab)))
        rows = [own.numpy() for own in found]
        return _spread(rows, row_of, -math.inf, (len(rows[0]) if rows else 0,), np.float64)

    log_masses_sync = blocking(log_masses, "numbers")

    async def _read(self, readout: ReadoutOf) -> tuple[list[Any], Indices]:
        """Return the answers for distinct contexts, and the index of each particle's, or -1."""
        with self._running():
            active = self._active()
            first, row_of = self._distinct(active)
            lm, context_of = await in_form(self._model), self._contexts_of(active[first]).context
            contexts = list(map(context_of, range(len(first))))
            answers = await lm.batch_read(contexts, readout, self._lora_name) if contexts else []
            return answers, self._in_group(active, row_of)

    # ---------------------------------------------------------------- the parts of a step

    def _check_idle(self) -> None:
        if self._is_running:
            raise ParticleError("an awaited call of this group has not ended: wait for it")

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._check_idle()
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _active(self) -> Indices:
        """Return the indices of the particles that are neither finished nor dead: ``[n]``."""
        return np.flatnonzero(self.is_active)

    def _in_group(self, active: Indices, row_of: Indices) -> Indices:
        found = np.full(len(self), -1, np.int64)
        found[active] = row_of
        return found

    def _uniforms(self, given: ArrayLike | None) -> Doubles:
        if given is None:
            counter = np.array([0, 0, self._num_draws, 0], np.uint64)
            stream = np.random.Philox(key=self._key, counter=counter)
            return np.random.Generator(stream).random(len(self))
        found = to_array("uniforms", given)
        if (
            found.dtype.kind not in "fiu"
            or found.shape != (len(self),)
            or not ((found >= 0) & (found < 1)).all()
        ):
            raise OptionError(f"uniforms must be {len(self)} numbers in [0, 1), got {shown(given)}")
        return found.astype(np.float64)

    def _masks(self, allowed: Any, by_group: Any, active: Indices) -> Masks | None:
        vocab_size = len(self._model.byte_vocab)
        if by_group is None:
            return masks_of(allowed, vocab_size, active, len(self))
        if allowed is not None:
            raise OptionError("pass allowed or allowed_by_group, not both")
        return masks_by_group(by_group, vocab_size, self.group_ids[active], self.num_groups)

    def _distinct(self, active: Indices) -> tuple[Indices, Indices]:
        """Number the distinct contexts of the active particles.

        Returns:
            For each context, the index in ``active`` of one particle that has it, int64 ``[R]``;
            and the number of each active particle's context, int64 ``[n]``.
        """
        lengths = (self._prompt_lengths + self._num_tokens)[active]
        most, longest = self._model.max_length, int(lengths.max(initial=0))
        if most is not None and longest > most:
            raise ContextError(
                f"particle {active[lengths.argmax()]} has {longest} tokens with its prompt, and "
                f"the model takes at most {most}: finish() such particles"
            )
        hints = self._hints[active]
        are_near = (hints != 0) & (lengths - self._hinted_lengths[active] <= 1)
        if len(active) and are_near.all():
            # Each hint is the node of a whole context, or of all its tokens but the last. So
            # contexts with equal hints, lengths and last tokens are equal.
            _, codes = np.unique(hints, return_inverse=True)
            codes = codes * (longest + 1) + lengths
            codes = codes * len(self._model.byte_vocab) + self._last_tokens[active]
            _, first, row_of = np.unique(codes, return_index=True, return_inverse=True)
            return first, row_of
        index_of, row_of = dict[Any, int](), list[int]()
        sizes = self._num_tokens.tolist()
        for i in active.tolist():
            key = self._prompt_ids[self.group_ids[i]], self._tokens[i, : sizes[i]].tobytes()
            row_of.append(index_of.setdefault(key, len(index_of)))
        rows = np.array(row_of, np.int64)
        return np.unique(rows, return_index=True)[1], rows

    def _steps(self, particles: Indices, next_ids: Indices | None = None) -> list[ParticleStep]:
        """Return steps of at most ``batch_size`` rows, without draws.

        Args:
            particles: A particle for each row: int64 ``[R]``.
            next_ids: A token to add to each particle's context: int64 ``[R]``; ``None`` adds none.
        """
        lengths, tokens = (self._prompt_lengths + self._num_tokens)[particles], next_ids
        if tokens is None:
            tokens = self._last_tokens[particles]
        else:
            lengths = lengths + 1
        size, steps = self._model.batch_size, list[ParticleStep]()
        for start in range(0, len(particles), size):
            own = slice(start, start + size)
            contexts = self._contexts_of(particles[own])
            step = ParticleStep(
                hints=contexts.hints,
                hint_key=self._hint_key,
                lengths=lengths[own].astype(np.int32),
                tokens=tokens[own].astype(np.int32),
                contexts=contexts if next_ids is None else contexts.followed_by(next_ids[own]),
                has_pictures=self._has_pictures,
            )
            steps.append(step)
        return steps

    async def _rows_ahead(self, active: Indices) -> list[StepResult] | None:
        """Return the rows of the pass that the last draw started; ``None`` if any is missing."""
        ahead = self._ahead
        if ahead is None or ahead.drawn is not None or not len(active):
            return None
        return None if (ahead.row_of[active] < 0).any() else await ahead.results()

    def _drop_ahead(self, is_wanted: object = False) -> None:
        """Unless ``is_wanted``, forget the pass that the last draw started, and cancel its task."""
        ahead = self._ahead
        if ahead is None or is_wanted:
            return
        self._ahead, loop = None, ahead.task.get_loop()
        if not ahead.task.done() and not loop.is_closed():
            loop.call_soon_threadsafe(ahead.task.cancel)

    async def _start_ahead(
        self, drawn: Indices, active: Indices, row_of: Indices, is_ahead: bool
    ) -> None:
        """Forget the last pass ahead; if ``is_ahead``, start one for contexts with drawn tokens."""
        self._drop_ahead()
        if not is_ahead:
            return
        ids, most = drawn[active], self._model.max_length
        lengths = (self._prompt_lengths + self._num_tokens)[active]
        own = np.flatnonzero((ids >= 0) & (most is None or lengths < most))
        codes = row_of[own] * len(self._model.byte_vocab) + ids[own]
        _, first, rows = np.unique(codes, return_index=True, return_inverse=True)
        steps = self._steps(active[own[first]], ids[own[first]])
        task = asyncio.ensure_future(self._model.particle_results(steps, self._lora_name))
        # Retrieve the exception, since asyncio logs an exception that is never retrieved.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        except BaseException:
            task.cancel()
            raise
        self._ahead = _Ahead(steps, task, self._in_group(active[own], rows), drawn)

    def _count_draw(self) -> None:
        self._num_draws += 1
        self._is_drawn = True

    def _contexts_of(self, particles: Indices) -> StepContexts:
        """Return the present contexts of ``particles``."""
        # The contexts may be made later. So the group's arrays are copied, except ``_tokens``:
        # ``append`` writes only after these sizes, and ``resample`` makes a new array.
        return StepContexts(
            prompts=self._prompts,
            groups=self.group_ids[particles],
            tokens=self._tokens,
            rows=particles,
            sizes=self._num_tokens[particles],
            hints=self._hints[particles],
            hint_key=self._hint_key,
        )

    def _draws(self, active: Indices, found: Doubles) -> Draws:
        """Return the group's draws, given the values of ``Pools.draw`` for the active particles."""
        if np.isnan(found[:, 4]).any():
            self._drop_ahead()  # or every later draw would read the same rows
            own = active[np.isnan(found[:, 4])]
            raise EvaluationError(
                f"the model's next-token row is NaN for {len(own)} of {len(self)} particles, such "
                f"as particle {own[0]}: finish() them to go on with the others"
            )
        is_possible = found[:, 4] > -math.inf
        token_ids, numbers = np.full(len(self), -1, np.int64), np.zeros((3, len(self)))
        numbers[:2, self._log_weights == -math.inf] = -math.inf
        token_ids[active[is_possible]] = found[is_possible, 0]
        numbers[:, active] = np.where(is_possible, found[:, 1:4].T, np.array(NO_DRAW[1:])[:, None])
        return Draws(token_ids, *numbers)

    def _rows(self, tables: Sequence[torch.Tensor], active: Indices, row_of: Indices) -> Rows:
        device = self._model.device
        own = [table.to("cpu" if device is None else device) for table in tables]
        empty = torch.empty(0, len(self._model.byte_vocab), dtype=torch.float32, device=device)
        table = torch.cat(own) if len(own) > 1 else own[0].clone() if own else empty
        return Rows(table, self._in_group(active, row_of))

    def _keep_hints(self, active: Indices, row_of: Indices, results: Sequence[StepResult]) -> None:
        """Store the number of the cache node of each active particle's context."""
        if not results:
            return
        key = results[-1].hint_key
        hints = np.zeros_like(self._hints) if key != self._hint_key else self._hints.copy()
        own = [r.hints if r.hint_key == key else np.zeros_like(r.hints) for r in results]
        hints[active] = np.concatenate(own)[row_of]
        self._hints, self._hint_key = hints, key
        self._hinted_lengths = self._hinted_lengths.copy()
        self._hinted_lengths[active] = (self._prompt_lengths + self._num_tokens)[active]


_TURNS: Final = 6  # of the event loop, after which a new batch has usually been sent


@final
class _Ahead(NamedTuple):
    """The pass that a draw has started for the next draw.

    Attributes:
        steps: The steps of the pass, without draws.
        task: The task that waits for their results.
        row_of: Index of each particle's row in the steps, or -1 if it has none: int64 ``[N]``.
        drawn: The drawn tokens, int64 ``[N]``; ``None`` once tokens have been appended.
    """

    steps: list[ParticleStep]
    task: asyncio.Future[list[StepResult]]
    row_of: Indices
    drawn: Indices | None

    def appended(self, token_ids: NDArray[np.int32]) -> _Ahead:
        """Return the pass without the rows that no longer belong to their particles' contexts."""
        is_drawn = token_ids == (-1 if self.drawn is None else self.drawn)
        return self._replace(row_of=np.where(is_drawn, self.row_of, -1), drawn=None)

    async def results(self) -> list[StepResult] | None:
        """Wait for the results; ``None`` if the pass failed or still runs in another loop."""
        if not self.task.done():
            if self.task.get_loop() is not asyncio.get_running_loop():
                return None
            await asyncio.wait([self.task])  # a cancelled wait leaves the task running
        # After a failure, the draw takes an ordinary pass, which may raise the same error.
        is_failed = self.task.cancelled() or self.task.exception() is not None
        return None if is_failed else self.task.result()


@final
class _Plan(NamedTuple):
    """How to draw: the checked options, and a random number for each active particle."""

    temperature: float
    bounds: SamplingFilter | None
    masks: Masks | None
    uniforms: Doubles

    def with_draws(
        self, steps: Sequence[ParticleStep], row_of: Indices
    ) -> tuple[list[ParticleStep], list[Indices]]:
        """Return steps with their draws, and the indices of each step's draws.

        Args:
            steps: The steps; together they have all rows, in order.
            row_of: The row of each draw: int64 ``[n]``.
        """
        # Sort the draws by pool; a pool is a distinct pair of a row and a mask.
        masks, mask_of = self.masks or (None, np.full(len(row_of), -1, np.int64))
        base = 1 if masks is None else len(masks) + 1
        codes, pool_of = np.unique(row_of * base + mask_of + 1, return_inverse=True)
        order = np.argsort(pool_of, kind="stable")
        pool_of, rows, mask_of = pool_of[order], codes // base, codes % base - 1
        ends = np.cumsum([0, *map(len, steps)])
        pool_ends = np.searchsorted(rows, ends)
        draw_ends = np.searchsorted(pool_of, pool_ends).tolist()
        made, places = list[ParticleStep](), list[Indices]()
        for i, step in enumerate(steps):
            own = slice(pool_ends[i], pool_ends[i + 1])
            size = int(pool_ends[i + 1] - pool_ends[i])
            pools = Pools(
                rows=rows[own] - ends[i],
                temperatures=np.full(size, self.temperature),
                bounds=None if self.bounds is None else [self.bounds] * size,
                masks=masks,
                mask_of=None if masks is None else mask_of[own],
            )
            places.append(order[draw_ends[i] : draw_ends[i + 1]])
            of_pool = pool_of[draw_ends[i] : draw_ends[i + 1]] - pool_ends[i]
            draws = TableDraws(pools, self.uniforms[places[-1]], of_pool)
            made.append(replace(step, draws=draws))
        return made, places


def _bounds(top_k: Any, top_p: Any, min_p: Any) -> SamplingFilter | None:
    bounds = SamplingFilter(
        integer(0)("top_k", top_k),
        number(0, 1, is_open=True)("top_p", top_p),
        number(0, 1)("min_p", min_p),
    )
    return None if bounds == SamplingFilter() else bounds


def _spread(
    rows: Sequence[Any], row_of: Indices, missing: float, shape: tuple[int, ...], dtype: Any
) -> NDArray[Any]:
    """Return each particle's entry of ``rows``; ``missing`` if its ``row_of`` is -1."""
    found = np.full((len(row_of), *shape), missing, dtype)
    if len(rows):
        found[row_of >= 0] = np.stack(rows)[row_of[row_of >= 0]]
    return found


_MOST_PARTICLES: Final = 1 << 24


def is_one_prompt(prompt: Any) -> bool:
    """Return whether ``prompt``, an argument of ``lm.particles``, is one prompt, not several."""
    is_listed = isinstance(prompt, Sequence) and not isinstance(prompt, (str, Context))
    return not is_listed or not prompt or isinstance(prompt[0], (int, np.integer))


def group_of(
    lm: Any, prompts: Sequence[Context], n: Any, seed: Any, lora_name: str | None
) -> ParticleGroup:
    """Check ``n`` and ``seed``; return a group for ``prompts``, which have been checked."""
    counts = [n] * len(prompts) if isinstance(n, (int, np.integer)) else listed("n", n)
    if len(counts) != len(prompts):
        raise OptionError(
            f"n must be one number, or a list with one for each of {len(prompts)} prompts; got a "
            f"list of {len(counts)}"
        )
    sizes = [integer(1, _MOST_PARTICLES)("n", count) for count in counts]
    own_seed = np.random.SeedSequence(optional(integer(0))("seed", seed))
    return ParticleGroup(
        lm, prompts, np.repeat(np.arange(len(prompts)), sizes), own_seed, lora_name
    )
