"""Particle groups: on every backend, each number is the one of the particle's fresh row."""

import asyncio
import math
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genlm_backend.errors import (
    BatcherClosedError,
    ContextError,
    OptionError,
    OptionTypeError,
    ParticleError,
    UnknownAdapterError,
)
from genlm_backend.llm import BatchedLM, PackedMask
from tests.llm import toy
from tests.llm.conftest import word_tokenizer
from tests.llm.families import VOCAB
from tests.naive import naive_draw, naive_log_proposals

PROMPT = [3, 1, 4, 1, 5]


class Reference:
    """Particles one by one, each from its fresh row."""

    def __init__(self, backend, prompts):
        self.backend, self.known = backend, {}
        self.ids = [list(prompt) for prompt in prompts]

    def row(self, i):
        key = tuple(self.ids[i])
        if key not in self.known:
            self.known[key] = self.backend.expected(key).double().numpy()
        return self.known[key]

    def check(self, draws, uniforms, masks=None, temperature=1.0, tolerance=1e-4):
        """Compare draws with those of the rows; a point at the edge of a token may be either."""
        slack = 20 * tolerance
        for i in np.flatnonzero(draws.token_ids >= 0).tolist():
            row, token_id = self.row(i), int(draws.token_ids[i])
            allowed = np.ones(VOCAB, bool) if masks is None else masks[i]
            log_proposal = 0.0
            if temperature:
                assert token_id in naive_draw(row, allowed, temperature, uniforms[i], slack)
                log_proposal = naive_log_proposals(row, allowed, temperature)[token_id]
            else:
                assert allowed[token_id]
                assert row[token_id] >= row[allowed].max() - slack
            expected = row[token_id], np.logaddexp.reduce(row[allowed]), log_proposal
            found = draws.logprobs[i], draws.log_allowed[i], draws.log_proposals[i]
            np.testing.assert_allclose(found, expected, rtol=0, atol=slack)

    def append(self, token_ids):
        for own, token_id in zip(self.ids, token_ids.tolist(), strict=True):
            own += [token_id] * (token_id >= 0)


def random_masks(rng, count):
    masks = rng.random((count, VOCAB)) < 0.3
    masks[:, 7] = True
    return masks


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
def test_draws_of_a_few_steps_match_fresh_rows(lm, backend, is_sync):
    rng, count = np.random.default_rng(0), 7

    async def main():
        group, reference = lm.particles(PROMPT, count, seed=1), Reference(backend, [PROMPT] * count)
        for step in range(5):
            uniforms, masks = rng.random(count), random_masks(rng, count)
            options = [{}, {"allowed": masks}, {"temperature": 0.6}, {"temperature": 0}][step % 4]
            options = {**options, "uniforms": uniforms}
            draws = group.draw_sync(**options) if is_sync else await group.draw(**options)
            reference.check(
                draws,
                uniforms,
                masks if "allowed" in options else None,
                options.get("temperature", 1.0),
                backend.tolerance,
            )
            group.append(draws.token_ids)
            reference.append(draws.token_ids)
            assert [list(context) for context in group.contexts()] == reference.ids

    asyncio.run(main())


def test_readouts_match_fresh_rows(lm, backend, close):
    group = lm.particles([PROMPT, [9, 9]], [3, 2], seed=0)
    group.append([1, 2, 1, 3, -1])
    group.finish(np.array([False, True, False, False, False]))
    contexts = [[*PROMPT, 1], [*PROMPT, 2], [*PROMPT, 1], [9, 9, 3], [9, 9]]
    rows = [backend.expected(ids) for ids in contexts]
    found = group.logprobs_sync()
    assert found.row_of[1] == -1
    assert found.row_of[0] == found.row_of[2]
    assert found.table.shape == (3, VOCAB)
    top, chosen = group.top_sync(4), group.logprobs_of_sync([5, 0, 5])
    masses = group.log_masses_sync([[1, 2, 3], np.arange(VOCAB) % 2 == 0])
    for i in (0, 2, 3, 4):
        close(found.table[found.row_of[i]], rows[i])
        close(torch.from_numpy(chosen[i]), rows[i][[5, 0, 5]])
        close(torch.from_numpy(top.logprobs[i]), rows[i].topk(4).values)
        close(rows[i][top.token_ids[i]], rows[i].topk(4).values)
        expected = [rows[i][[1, 2, 3]].logsumexp(0), rows[i][::2].logsumexp(0)]
        close(torch.from_numpy(masses[i]).float(), torch.stack(expected))
    assert (top.token_ids[1] == -1).all()
    assert all((own[1] == -math.inf).all() for own in (top.logprobs, chosen, masses))


def test_finished_dead_and_impossible_particles_draw_nothing(lm):
    group = lm.particles(PROMPT, 4, seed=0)
    group.finish(np.array([True, False, False, False]))
    group.reweight([0, -math.inf, 0, 0])
    allowed = np.ones((4, VOCAB), bool)
    allowed[2] = False
    draws = group.draw_sync(allowed=allowed)
    assert draws.token_ids[:3].tolist() == [-1, -1, -1]
    assert draws.token_ids[3] >= 0
    assert draws.logprobs[:3].tolist() == [0, -math.inf, -math.inf]
    assert draws.log_increments[:3].tolist() == [0, -math.inf, -math.inf]
    group.append(draws.token_ids)
    group.reweight(draws.log_increments)
    assert group.is_active.tolist() == [False, False, False, True]
    assert [len(context) for context in group.contexts()] == [5, 5, 5, 6]


def test_cancelled_draw_leaves_the_group_as_it_was(lm):
    async def main():
        group, same = (lm.particles(PROMPT, 5, seed=2) for _ in range(2))
        for step in range(3):
            task = asyncio.ensure_future(group.draw())
            for _ in range(step):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():  # it was done already
                same.append((await same.draw()).token_ids)
                group.append(task.result().token_ids)
                continue
            draws, others = await group.draw(), await same.draw()
            assert (draws.token_ids == others.token_ids).all()
            group.append(draws.token_ids)
            same.append(others.token_ids)

    asyncio.run(main())


def test_pass_ahead_answers_the_next_draw_unless_other_tokens_are_appended(lm):
    def go_on(group, token_ids):
        group.append(token_ids)
        group.finish(np.arange(5) == 4)
        group.reweight([-math.inf, 0, -math.inf, 0, 0])
        return group.resample(1.0)

    async def main():
        for change in (0, 1):
            lm.clear_cache()
            group, same = (lm.particles(PROMPT, 5, seed=2) for _ in range(2))
            draws = await group.draw(ahead=True)
            time.sleep(0.05)  # noqa: ASYNC251  (the pass begins without another turn of the loop)
            before = lm.statistics().num_awaits
            ancestors = go_on(group, (draws.token_ids + change) % VOCAB)
            assert (ancestors != np.arange(5))[group.is_active].any()
            last = await group.draw()
            assert (lm.statistics().num_awaits > before) == (change == 1)
            await same.draw()
            assert (go_on(same, (draws.token_ids + change) % VOCAB) == ancestors).all()
            expected = await same.draw()
            assert last.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(last.logprobs, expected.logprobs, rtol=0, atol=1e-4)

    asyncio.run(main())


def test_draws_after_a_pass_ahead_that_failed_or_is_of_an_ended_loop_match(lm):
    group, same = (lm.particles(PROMPT, 5, seed=2) for _ in range(2))

    async def step(is_ahead, is_dropped):
        group.append((await group.draw(ahead=is_ahead)).token_ids)
        same.append((await same.draw()).token_ids)
        if is_dropped:
            lm.reset_async_queries()
            lm.clear_cache()

    for is_ahead, is_dropped in ((True, True), (True, False), (False, False)):
        asyncio.run(step(is_ahead, is_dropped))
    assert group.token_ids() == same.token_ids()
    with pytest.raises(OptionError, match="event loop"):
        group.draw_sync(ahead=True)


class Held(toy.ToyEvaluator):
    """Evaluates the first batch at once, and later ones once ``go_on`` is set."""

    def evaluate(self, queries):
        if self.num_batches:
            self.go_on.wait(60)
        self.num_batches += 1
        return super().evaluate(queries)


@pytest.mark.parametrize("end", ["finish", "reweight"])
def test_pass_ahead_is_cancelled_once_all_particles_are_finished_or_dead(end):
    evaluator = Held()
    evaluator.num_batches, evaluator.go_on = 0, threading.Event()

    async def main():
        group, tasks = lm.particles(PROMPT, 5, seed=2), asyncio.all_tasks()
        group.append((await group.draw(ahead=True)).token_ids)
        started = asyncio.all_tasks() - tasks
        group.finish(np.ones(5, bool)) if end == "finish" else group.reweight(-math.inf)
        done, _ = await asyncio.wait(started, timeout=10)
        evaluator.go_on.set()
        assert done == started
        assert (await group.draw()).token_ids.tolist() == [-1] * 5

    with BatchedLM(word_tokenizer(), evaluator) as lm:
        asyncio.run(main())


def test_draw_after_a_cleared_cache_filled_by_others_matches_fresh_rows(lm, backend):
    group, reference = lm.particles(PROMPT, 4, seed=0), Reference(backend, [PROMPT] * 4)
    for step in range(3):
        group.draw_sync()
        group.append([step, step, 1, 2])
        reference.append(np.array([step, step, 1, 2]))
        lm.clear_cache()  # the numbers of its nodes go to these contexts
        lm.batch_next_token_logprobs_sync([[9, 8, 7, 6, 5, *range(k)] for k in range(step + 2)])
        uniforms = np.linspace(0, 0.99, 4)
        draws = group.draw_sync(uniforms=uniforms)
        reference.check(draws, uniforms, tolerance=backend.tolerance)


def test_other_calls_are_refused_while_a_draw_runs(lm):
    async def main():
        group = lm.particles(PROMPT, 3, seed=0)
        task = asyncio.ensure_future(group.draw())
        await asyncio.sleep(0)
        for call in (
            lambda: group.append([1, 1, 1]),
            lambda: group.reweight(0.0),
            lambda: group.finish(np.ones(3, bool)),
            group.resample,
            lambda: group[:2],
            group.draw_sync,
        ):
            with pytest.raises(ParticleError, match="an awaited call of this group has not"):
                call()
        with pytest.raises(ParticleError):
            await group.logprobs()
        draws = await task
        with pytest.raises(ParticleError, match=r"between draw.* and append"):
            group.resample()
        group.append(draws.token_ids)
        group.resample()

    asyncio.run(main())


def resampled_onto_a_dead_particle(lm):
    group = lm.particles(PROMPT, 3)
    group.reweight([0, -math.inf, 0])
    group.resample(1.0, "multinomial", retained=[1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda lm: lm.particles([], 3), ContextError, "empty"),
        (lambda lm: lm.particles(PROMPT, 0), OptionError, "n must be"),
        (lambda lm: lm.particles([PROMPT, PROMPT], [1]), OptionError, "one for each of 2 prompts"),
        (lambda lm: lm.particles([VOCAB], 1), ContextError, "outside"),
        (lambda lm: lm.particles(PROMPT, 2, seed=0.5), OptionTypeError, "seed"),
        (lambda lm: lm.particles(PROMPT, 2, lora_name="x"), UnknownAdapterError, "'x'"),
        (lambda lm: lm.particles(PROMPT, 2).append([1]), OptionError, "each of the 2 particles"),
        (lambda lm: lm.particles(PROMPT, 2).append([1, VOCAB]), OptionError, r"token_ids\[1\]"),
        (lambda lm: lm.particles(PROMPT, 2).append([1, 0.5]), OptionTypeError, "integers"),
        (lambda lm: lm.particles(PROMPT, 2).reweight([0, math.nan]), OptionError, "is nan"),
        (lambda lm: lm.particles(PROMPT, 2).reweight([0, 0, 0]), OptionError, "2 particles"),
        (lambda lm: lm.particles(PROMPT, 2).finish([1, 0]), OptionError, "bools"),
        (lambda lm: lm.particles(PROMPT, 2).resample(2), OptionError, "threshold"),
        (lambda lm: lm.particles(PROMPT, 2).resample(scheme="x"), OptionError, "systematic"),
        (lambda lm: lm.particles(PROMPT, 2).resample(retained=[0]), OptionError, "multinomial"),
        (lambda lm: resampled_onto_a_dead_particle(lm), OptionError, "particle 1, whose weight"),
        (
            lambda lm: lm.particles(PROMPT, 2).draw_sync(temperature=0, top_k=-1),
            OptionError,
            "top_k",
        ),
        (lambda lm: lm.particles(PROMPT, 2).draw_sync(temperature=-1), OptionError, "temperature"),
        (lambda lm: lm.particles(PROMPT, 2).draw_sync(top_p=0), OptionError, "top_p"),
        (lambda lm: lm.particles(PROMPT, 2).draw_sync(uniforms=[0, 1]), OptionError, "uniforms"),
        (lambda lm: lm.particles(PROMPT, 2).draw_sync(allowed=[1, 2]), OptionError, "allowed"),
        (
            lambda lm: lm.particles(PROMPT, 2).draw_sync(allowed=np.ones((3, VOCAB), bool)),
            OptionError,
            "one row for each particle",
        ),
    ],
)
def test_mistakes_raise_before_anything_is_queued(lm, call, error, message):
    before = lm.statistics().num_awaits
    with pytest.raises(error, match=message):
        call(lm)
    assert lm.statistics().num_awaits == before


def test_group_of_a_closed_model_raises(backend):
    with backend.make() as lm:
        group = lm.particles(PROMPT, 2)
    with pytest.raises(BatcherClosedError):
        group.draw_sync()


def test_tokens_appended_between_draws_keep_contexts_apart(lm, backend):
    group, reference = lm.particles(PROMPT, 4, seed=0), Reference(backend, [PROMPT] * 4)
    for step in range(4):
        uniforms = np.linspace(0.1, 0.9, 4)
        draws = group.draw_sync(uniforms=uniforms)
        reference.check(draws, uniforms, tolerance=backend.tolerance)
        for ids in (np.arange(4), np.full(4, 8))[: 2 - step % 2]:
            group.append(ids)
            reference.append(ids)


def test_contexts_that_the_cache_holds_in_part_keep_apart(lm, backend):
    """Long particles with equal last tokens, which leave no room for each other."""
    rng, count = np.random.default_rng(0), 6
    prompt = PROMPT * (2 if lm.max_length == 30 else 7)
    group, reference = lm.particles(prompt, count, seed=0), Reference(backend, [prompt] * count)
    for step in range(16):
        uniforms = rng.random(count)
        draws = group.draw_sync(uniforms=uniforms)
        reference.check(draws, uniforms, tolerance=backend.tolerance)
        ids = np.full(count, 7) if step % 4 == 3 else rng.integers(1, 9, count)
        group.append(ids)
        reference.append(ids)
        if step % 4 == 0:  # all become copies of the first
            group.reweight(np.where(np.arange(count) == 0, 0.0, -60.0))
            ancestors = group.resample(1.0)
            reference.ids = [list(reference.ids[i]) for i in ancestors]


def test_masks_of_every_kind_draw_the_same(lm):
    rng = np.random.default_rng(3)
    masks = random_masks(rng, 2)
    packed = [PackedMask(np.packbits(mask).tobytes(), VOCAB) for mask in masks]
    uniforms, each = rng.random(4), masks[[0, 0, 1, 1]]
    kinds = [
        {"allowed": each},
        {"allowed": torch.from_numpy(each)},
        {"allowed": [packed[0], masks[0], packed[1], torch.from_numpy(masks[1])]},
        {"allowed": lambda: each},
        {"allowed_by_group": masks},
    ]
    group, found = lm.particles([PROMPT, PROMPT], 2, seed=0), []
    for kind in kinds:
        found.append(group.draw_sync(uniforms=uniforms, **kind).token_ids.tolist())
    assert found == [found[0]] * len(kinds)
    everything = group.draw_sync(uniforms=uniforms, allowed=np.ones(VOCAB, bool))
    assert (everything.log_allowed == 0).all()  # exactly
    one = [group.draw_sync(uniforms=uniforms, allowed=own) for own in (masks[0], packed[0])]
    assert one[0].token_ids.tolist() == one[1].token_ids.tolist()
    assert masks[0][one[0].token_ids].all()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from([{}, {"temperature": 0.7}, {"allowed": True}])),
        st.tuples(st.just("step"), st.sampled_from([{"skip": True}, {"change": True}])),
        st.tuples(st.just("step"), st.just({"is_sync": True})),
        st.tuples(
            st.just("resample"), st.sampled_from(["systematic", "ssp", "residual", "multinomial"])
        ),
        st.tuples(st.just("finish"), st.integers(0, 5)),
        st.tuples(st.just("kill"), st.integers(0, 5)),
        st.tuples(st.just("clear"), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 12)),
        st.tuples(st.just("others"), st.integers(1, 4)),
        st.tuples(st.just("part"), st.integers(1, 6)),
        st.tuples(st.just("append"), st.integers(1, 40)),
    ),
    min_size=4,
    max_size=14,
)


@settings(
    max_examples=15,  # the reference runs every context whole
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(operations=OPERATIONS, seed=st.integers(0, 1000), batch_size=st.sampled_from([2, 4, 20]))
def test_any_history_matches_particles_one_by_one(backend, lm, operations, seed, batch_size):
    """Resampling, finishing, masks, passes ahead, evictions, cancellations, awaits of others."""

    async def main():
        rng, count = np.random.default_rng(seed), 6
        prompts = [PROMPT] * 3 + [[2, 7]] * 3
        group, reference = lm.particles([PROMPT, [2, 7]], 3, seed=seed), Reference(backend, prompts)
        others = list[tuple[list[int], asyncio.Future]]()
        limit = lm.max_length or 10_000
        for kind, argument in operations:
            if limit - max(map(len, reference.ids)) < (argument if kind == "append" else 1):
                continue
            if kind == "step":
                uniforms, masks = rng.random(count), random_masks(rng, count)
                is_masked, temperature = "allowed" in argument, argument.get("temperature", 1.0)
                options = {"uniforms": uniforms, "temperature": temperature}
                options |= {"allowed": masks} if is_masked else {}
                if argument.get("is_sync"):
                    draws = group.draw_sync(**options)
                else:
                    draws = await group.draw(**options, ahead=rng.random() < 0.5)
                drawn = draws.token_ids >= 0
                assert (drawn == group.is_active).all()
                given_masks = masks if is_masked else None
                reference.check(draws, uniforms, given_masks, temperature, backend.tolerance)
                ids = draws.token_ids.copy()
                if argument.get("skip"):
                    ids[::2] = -1
                if argument.get("change"):
                    ids[::3] = (ids[::3] + 1) % VOCAB
                group.append(ids)
                reference.append(ids)
                group.reweight(np.where(drawn, 0.3 * draws.logprobs, 0.0))
            elif kind == "resample":
                log_z = group.log_z
                ancestors = group.resample(0.9, argument)
                reference.ids = [list(reference.ids[i]) for i in ancestors]
                np.testing.assert_allclose(group.log_z, log_z, rtol=1e-9)
                assert (group.group_ids[ancestors] == group.group_ids).all()
            elif kind == "finish":
                group.finish(np.arange(count) == argument)
            elif kind == "kill":
                group.reweight(np.where(np.arange(count) == argument, -math.inf, 0.0))
            elif kind == "clear":
                lm.clear_cache()
            elif kind == "cancel":
                task = asyncio.ensure_future(group.draw(ahead=argument % 2 == 0))
                for _ in range(argument):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                group.append(np.full(count, -1))
            elif kind == "others":
                for _ in range(argument):
                    own = [*reference.ids[rng.integers(count)], int(rng.integers(VOCAB))]
                    others.append((own, asyncio.ensure_future(lm.next_token_logprobs(own))))
            elif kind == "append":  # of few ids, so that last tokens are equal by chance
                for _ in range(argument):
                    ids = rng.integers(-1, 3, count)
                    group.append(ids)
                    reference.append(ids)
            elif kind == "part":
                chosen = np.sort(rng.choice(count, min(argument, count), replace=False))
                group, count = group[chosen], len(chosen)
                reference.ids = [list(reference.ids[i]) for i in chosen]
            assert [list(context) for context in group.contexts()] == reference.ids
        for own, row in others:
            torch.testing.assert_close(
                await row, backend.expected(own), rtol=0, atol=backend.tolerance
            )

    lm.batch_size = batch_size
    asyncio.run(main())
