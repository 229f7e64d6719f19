"""Sequential Monte Carlo by hand, to be copied and changed; `genlm_backend.smc` has more options.

Texts have the model's probability times exp(twist), within the constraint. A particle gains the
log-probability of each token under the model, less the one with which the token was drawn. When a
few particles have most of the weight, copies of them replace the others.
"""

import numpy as np

from genlm_backend import AsyncLM, Constraint, ParticleGroup


async def smc(
    lm: AsyncLM, prompt, n=100, *, max_tokens=50, constraint: Constraint | None = None, twist=None,
    allowed=None, proposal: dict | None = None, threshold=0.5, seed=None,
) -> ParticleGroup:  # fmt: skip
    """Return the particles; `group.log_z` has the estimate of log Z.

    `twist(ids)` is the logarithm of a factor; `proposal` are options of `ParticleGroup.draw`. Texts
    that the constraint has not let end within `max_tokens` have a weight of zero.
    """
    group, log_twists = lm.particles(prompt, n, seed=seed), np.zeros(n)
    states = [constraint.fork() for _ in range(n)] if constraint else []
    for _ in range(max_tokens):
        if not group.is_active.any():
            break
        ancestors = group.resample(threshold)
        log_twists = log_twists[ancestors]  # copy what the program holds for each particle, too
        states = [states[i].fork() for i in ancestors] if states else []
        draws = await group.draw(allowed=states or allowed, **(proposal or {}))
        group.append(draws.token_ids)  # -1 for particles that have ended or cannot go on
        group.reweight(draws.log_increments)
        moved = np.flatnonzero(draws.token_ids >= 0)
        for i in moved if states else ():
            states[i].advance(int(draws.token_ids[i]))
        are_ends = np.isin(draws.token_ids, [*lm.eos_token_ids])
        group.finish([state.is_ended for state in states] or are_ends)
        if twist:
            ids, gains = group.token_ids(), np.zeros(n)
            gains[moved] = [twist(ids[i]) for i in moved] - log_twists[moved]
            group.reweight(gains)
            log_twists += gains
    if states:
        group.reweight(np.where(group.is_done, 0, -np.inf))
    return group
