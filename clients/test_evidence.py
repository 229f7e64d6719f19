"""`smc` and `examples/smc.py` find the log Z that genlm-control and llamppl find."""

import sys
from pathlib import Path

import numpy as np
import pytest
from genlm.control import AWRS, BoolFSA, PromptedLLM  # pyright: ignore[reportMissingImports]

from genlm_backend import Constraint, load_model_by_name, smc

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import llamppl_words  # pyright: ignore[reportMissingImports]
import smc as example  # pyright: ignore[reportMissingImports]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT, PATTERN = "I have seen", r" (a|the|my) [a-z]{1,6}\."
NUM_PARTICLES, NUM_RUNS = 80, 8


def log_mean(log_zs):
    """The logarithm of the mean of several Z, and its standard error."""
    total = np.logaddexp.reduce(log_zs) - np.log(len(log_zs))
    return total, np.exp(np.array(log_zs) - total).std(ddof=1) / np.sqrt(len(log_zs))


def check(ours, theirs):
    (own, own_error), (other, other_error) = log_mean(ours), log_mean(theirs)
    assert own == pytest.approx(other, abs=0.3 + 4 * np.hypot(own_error, other_error))


async def own_runs(prompt, allowed=None, pattern=None, max_tokens=12):
    with load_model_by_name("smollm2", backend="hf") as lm:
        constraint = pattern and Constraint.from_regex(lm, pattern)
        options = {"max_tokens": max_tokens, "allowed": allowed, "constraint": constraint}
        of_library = await smc(lm, prompt, NUM_PARTICLES, **options, repeats=NUM_RUNS, seed=0)
        groups = [
            await example.smc(lm, prompt, NUM_PARTICLES, **options, seed=seed)
            for seed in range(NUM_RUNS)
        ]
    return of_library.group.log_z, np.concatenate([group.log_z for group in groups])


@pytest.mark.asyncio
async def test_log_z_within_a_regular_expression_is_that_of_genlm_control():
    llm = PromptedLLM.from_name("smollm2", backend="hf", batch_size=NUM_PARTICLES)
    llm.set_prompt_from_str(PROMPT)
    theirs = []
    for _ in range(NUM_RUNS):
        sampler = AWRS(llm, BoolFSA.from_regex(PATTERN).coerce(llm, f=b"".join))
        sequences = await sampler.smc(NUM_PARTICLES, ess_threshold=0.5, max_tokens=12)
        await sampler.cleanup()
        theirs.append(sequences.log_ml)
    for ours in await own_runs(PROMPT, pattern=PATTERN):
        check(ours, theirs)


@pytest.mark.asyncio
async def test_log_z_of_short_words_is_that_of_llamppl():
    lm = llamppl_words.load("smollm2", NUM_PARTICLES)
    allowed = llamppl_words.ShortWords(lm, 5, 5).allowed
    theirs = []
    for _ in range(NUM_RUNS):
        model = llamppl_words.ShortWords(lm, 5, 5)
        found = await llamppl_words.smc_standard(model, NUM_PARTICLES)
        weights = [particle.weight for particle in found]
        theirs.append(np.logaddexp.reduce(weights) - np.log(NUM_PARTICLES))
    masks = np.array(sorted(allowed))
    for ours in await own_runs(llamppl_words.PROMPT, masks, max_tokens=5):
        check(ours, theirs)
