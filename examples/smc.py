"""Sequential Monte Carlo, to be copied; `demo.py` and `json_smc.py` run it.

Texts come by the model's probability of them, times exp(twist), within what is allowed. A particle
gains the weight of each token under the model over that under the proposal; one that nothing is
possible for dies. Where few have most of the weight, copies of them replace the light ones.
"""

from dataclasses import dataclass, replace

import numpy as np
from tqdm.auto import tqdm

from genlm_backend import AsyncLM, Constraint


@dataclass
class Particle:
    constraint: Constraint | None
    ids: tuple[int, ...] = ()  # what follows the prompt, with the token that ends the text
    log_weight: float = 0.0
    log_twist: float = 0.0  # of the ids so far, which is in the weight
    is_done: bool = False

    def go_on(self, draw, ends, twist):
        self.log_weight += draw.logprob - draw.log_proposal
        if draw.token_id < 0:  # nothing was possible, and the weight is zero
            return
        self.ids, self.is_done = (*self.ids, draw.token_id), draw.token_id in ends
        if self.constraint is not None:
            self.constraint.advance(draw.token_id)
            self.is_done = self.constraint.is_ended
        before, self.log_twist = self.log_twist, twist(self.ids) if twist else 0.0
        self.log_weight += self.log_twist - before

    def copy(self, log_weight):
        constraint = self.constraint and self.constraint.fork()
        return replace(self, constraint=constraint, log_weight=log_weight)


async def smc(
    lm: AsyncLM, prompt, *, particles=30, max_tokens=50, constraint=None, allowed=None, twist=None,
    proposal: dict | None = None, ess_threshold=0.5, seed=None, progress=False,
):  # fmt: skip
    """Return the particles, log Z, and the effective sample size of each step.

    `constraint` is forked for each particle; `allowed` are the tokens of all. `twist(ids)` is the
    logarithm of a factor, -inf only where no text goes on to another; `proposal` are options of
    draws, such as `{"temperature": 1.5}`, which leave everything possible. Texts of `max_tokens`
    are texts, but those that a constraint has not let end weigh nothing: `allowed` has the ids in
    `lm.eos_token_ids` then, and log Z is -inf where `max_tokens` are too few for any to end.
    """
    random, sizes = np.random.default_rng(seed), []
    swarm = [Particle(constraint and constraint.fork()) for _ in range(particles)]
    for step in tqdm(range(max_tokens), "sampling", disable=None if progress else True):
        active = [p for p in swarm if not p.is_done and p.log_weight > -np.inf]
        if not active:
            break
        masks = [allowed] * len(active)
        if constraint is not None:
            masks = Constraint.masks([p.constraint for p in active if p.constraint])
            masks = masks if allowed is None else [mask & allowed for mask in masks]
        opts = {**(proposal or {}), "generator": random, "impossible": "return", "allowed": masks}
        contexts = [[*prompt, *p.ids] for p in active]
        draws = await lm.batch_draw_next_token(contexts, **opts)
        for particle, draw in zip(active, draws, strict=True):
            particle.go_on(draw, lm.eos_token_ids, twist)
        log_weights = np.array([p.log_weight for p in swarm])
        total = np.logaddexp.reduce(log_weights)
        weights = np.exp(log_weights - total) if total > -np.inf else np.zeros(particles)
        sizes.append(weights.sum() and 1 / np.square(weights).sum())
        goes_on = step + 1 < max_tokens and any(not p.is_done for p in swarm)  # or copies are waste
        if goes_on and 0 < sizes[-1] < ess_threshold * particles:  # systematic: one number for all
            points = (random.random() + np.arange(particles)) / particles
            chosen = np.searchsorted(weights.cumsum() / weights.sum(), points, "right")
            swarm = [swarm[i].copy(total - np.log(particles)) for i in chosen]
    for particle in swarm:
        if constraint is not None and not particle.is_done:
            particle.log_weight = -np.inf
    return swarm, np.logaddexp.reduce([p.log_weight for p in swarm]) - np.log(particles), sizes
