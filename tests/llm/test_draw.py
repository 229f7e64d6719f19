"""Draws from rows, against the inverse of a cumulative sum over the whole row."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from genlm_backend import MockAsyncLM
from genlm_backend.errors import EvaluationError, OptionError, OptionTypeError
from genlm_backend.queries.query import RowQuery
from genlm_backend.readouts.draw import PackedMask, draw, draw_token, weights_of
from genlm_backend.readouts.draw_table import Pools
from genlm_backend.readouts.sample_readout import (
    NO_DRAW,
    SampleReadout,
    SamplingFilter,
    drawn_at_once,
)
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_draw, naive_kept, naive_log_proposals

SIZE = 49_152
LAST = 1 - 2**-53
"""The largest random number that there is."""


@pytest.fixture(scope="module")
def lm():
    with MockAsyncLM(word_tokenizer(7)) as lm:
        yield lm


def row_of(size=SIZE, seed=0):
    """A row as a model gives it, of which a tenth is masked."""
    generator = np.random.default_rng(seed)
    row = generator.normal(0, 3, size).astype(np.float32)
    row[generator.random(size) < 0.1] = -np.inf
    row -= np.logaddexp.reduce(row)
    return torch.from_numpy(row)


# -------------------------------------------------------------------- the distribution


@pytest.mark.parametrize("temperature", [0.3, 1, 2.5])
@pytest.mark.parametrize("size", [1, 5, 511, 512, 3001, SIZE])
def test_a_draw_inverts_the_cumulative_distribution(size, temperature):
    row = row_of(size)
    if not row.isfinite().any():
        row[0] = 0
    generator = np.random.default_rng(3)
    points = np.random.default_rng(3).random(50)
    for point in points:
        token_id = draw(row, size, generator, temperature)
        assert token_id in naive_draw(row.numpy(), None, temperature, point, 1e-6)


@pytest.mark.parametrize("make", [np.random.default_rng, torch.Generator().manual_seed, None])
@pytest.mark.parametrize("temperature", [0.5, 1, 2, math.inf])
def test_draws_follow_the_distribution(lm, make, temperature):
    """Pearson's statistic of 10,000 draws stays below a bound that one in a million exceeds."""
    row = torch.tensor([-1.0, -torch.inf, 0.5, 2.0, -torch.inf, 1.0, -0.5])
    generator = None if make is None else make(11)
    draws = [lm.draw(row, generator=generator, temperature=temperature) for _ in range(10_000)]
    counts = np.bincount(draws, minlength=7)
    possible = np.array([0, 2, 3, 5, 6])
    weights = np.exp(row.double().numpy()[possible] / temperature)
    expected = 10_000 * weights / weights.sum()
    assert counts[possible].sum() == 10_000
    assert (np.square(counts[possible] - expected) / expected).sum() < 33.4  # 4 degrees of freedom


@pytest.mark.parametrize("temperature", [1, 0.5])
def test_rare_tokens_after_a_frequent_one_keep_their_probability(temperature):
    """Each has 1e-9 of the whole, which a running sum in float32 would lose beside one."""
    row = np.full(SIZE, -np.inf, np.float32)
    row[7] = 0
    rare = np.arange(SIZE - 200, SIZE, 2)
    row[rare] = temperature * math.log(1e-9)
    for number, token_id in enumerate(rare):
        point = (1 + (number + 0.5) * 1e-9) / (1 + 100e-9)
        assert draw_token(row, temperature, lambda point=point: point) == token_id
    assert draw_token(row, temperature, lambda: LAST) == rare[-1]
    assert draw_token(row, temperature, lambda: 0.0) == 7


def test_temperature_zero_draws_the_first_argmax_without_randomness(lm):
    row = torch.tensor([-torch.inf, 1.0, 2.0, 2.0, -5.0, 2.0, 0.0])
    generator = np.random.default_rng(0)
    assert {lm.draw(row, generator=generator, temperature=0) for _ in range(5)} == {2}
    assert generator.random() == np.random.default_rng(0).random()


# -------------------------------------------------------------------- what is impossible

SCORES = st.one_of(
    st.just(-math.inf),
    st.floats(-1e3, 1e3, width=32),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
)
TEMPERATURES = st.one_of(
    st.sampled_from([0.0, 1.0, 5e-324, 1e-42, 1e300, math.inf]), st.floats(0.01, 100)
)
POINTS = st.one_of(st.sampled_from([0.0, 5e-324, 0.5, LAST]), st.floats(0, LAST))


@given(
    arrays.arrays(np.float32, st.integers(1, 1500), elements=SCORES, fill=SCORES),
    TEMPERATURES,
    POINTS,
)
def test_masked_tokens_are_never_drawn(row, temperature, point):
    if np.isneginf(row).all():
        row[-1] = 0
    token_id = draw_token(row, temperature, lambda: point)
    assert row[token_id] > -math.inf
    if temperature == 0:
        assert token_id == row.tolist().index(max(row.tolist()))


# -------------------------------------------------------------------- arguments


def test_draws_do_not_depend_on_type_or_layout_of_the_row(lm):
    row = torch.tensor([-1.0, -torch.inf, 0.5, 2.0, -3.5, 1.0, -0.5])
    wide = torch.zeros(7, 3)
    wide[:, 1] = row
    shapes = {
        "normalised": row.log_softmax(-1),
        "of an array": row.numpy(),
        "float64": row.double(),
        "array of float64": row.double().numpy(),
        "float16": row.half(),
        "array of float16": row.half().numpy(),
        "bfloat16": row.bfloat16(),
        "a column": wide[:, 1],
        "with a gradient": row.clone().requires_grad_(),
        "read only": np.frombuffer(row.numpy().tobytes(), np.float32),
    }
    before = row.clone()
    expected = [lm.draw(row, generator=g) for g in map(np.random.default_rng, range(50))]
    for name, other in shapes.items():
        found = [lm.draw(other, generator=g) for g in map(np.random.default_rng, range(50))]
        assert found == expected, name
    assert row.equal(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_and_generators_may_be_on_a_gpu(lm):
    row = torch.tensor([-1.0, -torch.inf, 0.5, 2.0, -3.5, 1.0, -0.5])
    for seed in range(20):
        first, second = np.random.default_rng(seed), np.random.default_rng(seed)
        assert lm.draw(row.cuda(), generator=first) == lm.draw(row, generator=second)
    generator = torch.Generator("cuda").manual_seed(0)
    assert len({lm.draw(row.cuda(), generator=generator) for _ in range(100)}) > 2


@pytest.mark.parametrize(
    "make", [np.random.default_rng, lambda s: torch.Generator().manual_seed(s)]
)
def test_equal_generators_give_equal_sequences_of_draws(lm, make):
    row = torch.zeros(7)
    first, second, other = make(1), make(1), make(2)
    draws = [lm.draw(row, generator=first) for _ in range(30)]
    assert draws == [lm.draw(row, generator=second) for _ in range(30)]
    assert draws != [lm.draw(row, generator=other) for _ in range(30)]
    assert len(set(draws)) > 3


def test_global_seeds_do_not_affect_draws_without_a_generator(lm):
    row, found = torch.zeros(7), []
    for _ in range(2):
        np.random.seed(0)
        torch.manual_seed(0)
        found.append([lm.draw(row) for _ in range(60)])
    assert found[0] != found[1]


@pytest.mark.parametrize("temperature", [0, 0.5, 1, math.inf])
@pytest.mark.parametrize(
    "row", [[-torch.inf] * 7, [0.0] * 6 + [torch.nan], [torch.inf] + [0.0] * 6]
)
def test_row_without_a_finite_maximum_raises_option_error(lm, row, temperature):
    with pytest.raises(OptionError, match="no token can be chosen from a row whose largest score"):
        lm.draw(torch.tensor(row), temperature=temperature)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (torch.zeros(6), r"row must have 7 elements.*got the shape \(6,\)"),
        (torch.zeros(1, 7), r"got the shape \(1, 7\)"),
        (np.zeros((7, 1)), r"got the shape \(7, 1\)"),
        (torch.zeros(()), r"got the shape \(\)"),
    ],
)
def test_a_row_of_another_shape_is_refused(lm, row, message):
    with pytest.raises(OptionError, match=message):
        lm.draw(row)


def test_row_of_probabilities_is_refused():
    with MockAsyncLM(word_tokenizer()) as lm:
        row = lm.next_token_logprobs_sync([1])
        with pytest.raises(OptionError, match="row seems to contain probabilities: pass their log"):
            lm.draw(row.exp())


@pytest.mark.parametrize(
    "row",
    [
        [0.0] * 7,
        None,
        torch.zeros(7, dtype=torch.int64),
        torch.zeros(7, dtype=torch.bool),
        torch.zeros(7, dtype=torch.complex64),
        np.zeros(7, int),
        torch.zeros(7).to_sparse(),
        torch.zeros(7, device="meta"),
    ],
)
def test_row_that_is_no_dense_float_tensor_or_array_is_refused(lm, row):
    with pytest.raises(OptionTypeError, match="row must be a tensor or array of floats, got"):
        lm.draw(row)


@pytest.mark.parametrize("generator", [7, "x", np.random.RandomState(0), np.random])
def test_seeds_and_legacy_numpy_generators_are_refused(lm, generator):
    with pytest.raises(OptionTypeError, match=r"make np.random.default_rng\(seed\) once, and pass"):
        lm.draw(torch.zeros(7), generator=generator)


def test_invalid_temperature_is_refused(lm):
    for temperature in (-1, math.nan):
        with pytest.raises(OptionError, match="temperature must be a number of 0 or more"):
            lm.draw(torch.zeros(7), temperature=temperature)
    with pytest.raises(OptionTypeError, match="temperature"):
        lm.draw(torch.zeros(7), temperature="hot")


# ---------------------------------------------------------------- from rows on a device


def mask_of(drawing, size):
    """Return which tokens a readout allows: bool ``[vocab]``."""
    if drawing.allowed is None:
        return np.ones(size, bool)
    return PackedMask(drawing.allowed, size).unpacked().numpy()


def check_draw(found, drawing, row):
    """Compare a token, and the probability with which it was drawn, with the whole row's."""
    given = row, mask_of(drawing, len(row)), drawing.temperature
    assert found.token_id in naive_draw(*given, drawing.uniforms[0])
    check_proposal(found, *given)


def check_proposal(found, row, allowed, temperature):
    expected = naive_log_proposals(row, allowed, temperature)[found.token_id]
    assert found.log_proposal == pytest.approx(expected, abs=3e-5)
    assert found.log_proposal <= 0
    if temperature == 1:
        weight = found.logprob - found.log_proposal
        assert weight == pytest.approx(found.log_allowed, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_batched_draws_match_draws_from_each_row(data):
    """Rows as they are drawn from on a device; here they are the processor's."""
    vocab_size = data.draw(st.sampled_from([2, 30, 255, 256, 257, 1000, 5000]))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    count = data.draw(st.integers(1, 6))
    logits = random.normal(0, data.draw(st.sampled_from([0.1, 3, 30])), (count, vocab_size))
    logits[random.random(logits.shape) < data.draw(st.sampled_from([0, 0.5, 0.95]))] = -np.inf
    logits[:, random.integers(vocab_size)] = 0  # which is possible
    rows = torch.from_numpy(logits).log_softmax(-1).float()
    query = RowQuery([1])
    drawings = []
    for row in rows.numpy():
        allowed = random.random(vocab_size) < 0.5
        allowed[row.argmax()] = True
        mask = np.packbits(allowed).tobytes() if random.random() < 0.6 else None
        temperature = data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, float("inf")]))
        uniform = data.draw(
            st.sampled_from([0.0, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True)
        )
        drawings.append(SampleReadout(query, temperature, (uniform,), mask))
    found = drawn_at_once(drawings, rows)
    for (draw_found,), drawing, row in zip(found, drawings, rows, strict=True):
        (expected,) = drawing.of_logprobs(row)
        assert draw_found.logprob == row[draw_found.token_id].item()
        assert draw_found.log_allowed == pytest.approx(expected.log_allowed, abs=1e-5)
        if drawing.allowed is None:
            assert draw_found.log_allowed == 0
        for one in (draw_found, expected):
            check_draw(one, drawing, row.numpy())


def test_batched_draw_without_possible_token_fails_only_for_its_row():
    rows = torch.full((3, 700), -torch.inf, dtype=torch.float32)
    rows[0, 5], rows[2, 699] = 0, 0
    nothing = np.packbits(np.zeros(700, bool)).tobytes()
    drawings = [
        SampleReadout(RowQuery([1]), 1.0, (0.9,)),
        SampleReadout(RowQuery([1]), 1.0, (0.9,)),
        SampleReadout(RowQuery([1]), 1.0, (0.9,), nothing, True),
    ]
    first, second, third = drawn_at_once(drawings, rows)
    assert first == ((5, 0.0, 0.0, 0.0),)
    assert isinstance(second, EvaluationError)
    assert third == (NO_DRAW,)


# ---------------------------------------------------------------- several from one row


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_several_draws_equal_as_many_single_draws(data):
    size = data.draw(st.sampled_from([1, 2, 30, 511, 512, 513, 3000]))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = random.normal(0, data.draw(st.sampled_from([0.1, 3, 40])), size)
    logits[random.random(size) < data.draw(st.sampled_from([0, 0.5, 0.95]))] = -np.inf
    logits[random.integers(size)] = 0
    row = torch.from_numpy(logits).log_softmax(-1).float()
    mask = random.random(size) < 0.7
    mask[row.argmax()] = True
    options = {
        "temperature": data.draw(st.sampled_from([0.0, 0.4, 1.0, 3.0, math.inf])),
        "allowed": data.draw(st.sampled_from([None, np.packbits(mask).tobytes()])),
        "cuts": data.draw(
            st.sampled_from([None, SamplingFilter(top_k=4), SamplingFilter(top_p=0.8)])
        ),
    }
    uniforms = tuple(random.random(data.draw(st.integers(1, 8))).tolist())
    query = RowQuery([1])
    single = [SampleReadout(query, uniforms=(uniform,), **options) for uniform in uniforms]
    several = SampleReadout(query, uniforms=uniforms, **options)
    assert several.of_logprobs(row) == tuple(each.of_logprobs(row)[0] for each in single)

    # Distinct ones: each is a single draw of what the ones before it have left.
    found = SampleReadout(query, uniforms=uniforms, are_distinct=True, **options).of_logprobs(row)
    is_left = mask_of(several, size) & np.isfinite(row.numpy())
    if options["cuts"] is not None and options["temperature"]:
        masked = np.where(is_left, row.numpy(), np.float32(-np.inf))
        weights = weights_of(masked, masked.max(), options["temperature"])
        kept = options["cuts"].kept(masked, weights)
        is_left &= np.isin(np.arange(size), kept)
    assert len(found) == min(len(uniforms), is_left.sum())
    for one, uniform in zip(found, uniforms, strict=False):
        own = row.numpy(), is_left, options["temperature"]
        assert one.token_id in naive_draw(*own, uniform)
        check_proposal(one, *own)
        expected = np.logaddexp.reduce(row.numpy()[is_left].astype(np.float64))
        assert one.log_allowed == pytest.approx(min(expected, 0), abs=1e-5)
        is_left[one.token_id] = False


@pytest.mark.parametrize("top_k", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0, math.inf])
def test_distinct_draws_under_top_k_return_every_possible_token(top_k, temperature):
    row = torch.tensor([0.0, -6, -7, -8, -9, -10, -11, -math.inf]).log_softmax(-1)
    uniforms = tuple(np.random.default_rng(0).random(9))
    draws = SampleReadout(
        RowQuery([1]), temperature, uniforms, cuts=SamplingFilter(top_k=top_k), are_distinct=True
    ).of_logprobs(row)
    assert sorted(draw.token_id for draw in draws) == list(range(min(top_k, 7)))


def test_distinct_draws_follow_the_plackett_luce_distribution():
    """The share of each ordered pair is that of Plackett and Luce (chi-square)."""
    probabilities = np.array([0.5, 0.25, 0.0, 0.15, 0.1])
    row = torch.from_numpy(probabilities).log().float()
    random, number = np.random.default_rng(0), 6000
    counts = np.zeros((5, 5))
    for _ in range(number):
        draws = SampleReadout(RowQuery([1]), 1.0, tuple(random.random(2)), are_distinct=True)
        first, second = draws.of_logprobs(row)
        counts[first.token_id, second.token_id] += 1
    expected = probabilities[:, None] * probabilities / (1 - probabilities[:, None])
    expected[np.arange(5), np.arange(5)] = 0
    possible = expected > 0
    assert counts.sum() == counts[possible].sum()
    expected = number * expected[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    assert statistic < 31.3  # of eleven degrees of freedom, one in a thousand


def test_distinct_draws_find_tokens_of_vanishing_probability():
    """Weights beside the largest one would be zeros."""
    row = torch.tensor([-0.0, -150.0, -math.inf, -400.0])
    for temperature in (1.0, 0.3):
        draws = SampleReadout(RowQuery([1]), temperature, (0.5,) * 4, are_distinct=True)
        found = draws.of_logprobs(row)
        assert [one.token_id for one in found] == [0, 1, 3]
        assert [one.log_allowed for one in found] == [0.0, -150.0, -400.0]
        assert [one.log_proposal for one in found] == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------- bounds


WAYS = pytest.mark.parametrize(
    "of_rows", [SampleReadout.of_rows, drawn_at_once], ids=["here", "at once"]
)
"""On the processor a row at a time, and as on a device."""


@WAYS
def test_tokens_tied_at_top_k_or_top_p_bounds_are_all_kept(of_rows):
    row = torch.tensor([0.4, 0.1, 0.4, 0.1], dtype=torch.float32).log()
    cuts = SamplingFilter(top_k=1, top_p=0.5)
    drawings = [SampleReadout(RowQuery([1]), 1.0, (uniform,), cuts=cuts) for uniform in (0.0, LAST)]
    found = of_rows(drawings, row.expand(2, -1))
    assert [one.token_id for (one,) in found] == [0, 2]
    assert [one.log_allowed for (one,) in found] == pytest.approx([math.log(0.8)] * 2, abs=1e-6)


@WAYS
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_top_k_top_p_and_min_p_keep_the_tokens_of_transformers(of_rows, data):
    vocab_size = data.draw(st.sampled_from([3, 40, 700, 5000]))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = random.normal(0, data.draw(st.sampled_from([0.01, 1, 5])), vocab_size)
    row = torch.from_numpy(logits).log_softmax(-1).float().numpy()
    mask = random.random(vocab_size) < data.draw(st.sampled_from([0.3, 2.0]))
    mask[random.integers(vocab_size)] = True
    cuts = SamplingFilter(
        data.draw(st.sampled_from([0, 1, 2, 30, 10_000])),
        data.draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01])),
        data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
    )
    temperature = data.draw(st.sampled_from([1.0, 0.7, 2.0]))
    left = naive_kept(row, mask, temperature, *cuts)
    packed = np.packbits(mask).tobytes()
    uniforms = [*random.random(20), 0.0, LAST]
    drawings = [
        SampleReadout(RowQuery([1]), temperature, (float(uniform),), packed, cuts=cuts)
        for uniform in uniforms
    ]
    rows = torch.from_numpy(row).expand(len(drawings), -1)
    # Of tokens that are equally probable at a bound, transformers may leave some out; here, all
    # count.
    within = mask & (row >= row[left].min())
    sums = [np.logaddexp.reduce(row[own].astype(np.float64)) for own in (left, within)]
    for (found,) in of_rows(drawings, rows):
        assert within[found.token_id]
        # To a token at the bound, which rounding may leave out or not.
        largest = np.exp(row[mask].max() - sums[0]) * 2e-4 + 1e-5
        assert any(
            found.log_allowed == pytest.approx(min(expected, 0), abs=max(largest, 2e-3))
            for expected in sums
        )
    last = of_rows([drawings[-1]], rows[:1])[0][0].token_id
    if not mask.all():
        assert last in {np.flatnonzero(own)[-1] for own in (left, within)}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_batched_sampling_bounds_match_row_by_row_draws(data):
    """Each row by its own bounds, as a row at a time has them; a greedy one by none."""
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    vocab_size, number = data.draw(st.sampled_from([3, 40, 5000])), data.draw(st.integers(1, 9))
    logits = random.normal(0, data.draw(st.sampled_from([0.01, 1, 5])), (number, vocab_size))
    rows = torch.from_numpy(logits).log_softmax(-1).float()
    drawings = []
    for _ in range(number):
        cuts = SamplingFilter(
            int(random.choice([0, 1, 2, 30, 10_000])),
            float(random.choice([1.0, 0.999, 0.9, 0.5, 0.01])),
            float(random.choice([0.0, 0.05, 0.5, 1.0])),
        )
        mask = random.random(vocab_size) < 0.7
        mask[random.integers(vocab_size)] = True
        drawings.append(
            SampleReadout(
                RowQuery([1]),
                float(random.choice([0, 0.7, 1, 2])),
                (random.random(),),
                [None, np.packbits(mask).tobytes()][random.integers(2)],
                cuts=[None, cuts][random.integers(2)],
            )
        )
    at_once, one_by_one = drawn_at_once(drawings, rows), SampleReadout.of_rows(drawings, rows)
    for (found,), (expected,) in zip(at_once, one_by_one, strict=True):
        assert found.token_id == expected.token_id
        assert found == pytest.approx(expected, abs=1e-5)


def test_sampling_bounds_are_validated_and_applied(lm):
    for wrong in ({"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": 2}, {"min_p": math.nan}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            lm.draw_next_token_sync([1], **wrong)
    with pytest.raises(OptionTypeError, match="top_k"):
        lm.draw_next_token_sync([1], top_k=1.5)
    with pytest.raises(OptionTypeError, match=r"top_q is not an option of draws; did you mean"):
        lm.draw_next_token_sync([1], top_q=1)
    row = lm.next_token_logprobs_sync([1])
    drawn = lm.draw_next_token_sync([1], top_k=1)
    assert drawn[:2] == (int(row.argmax()), row.max().item())
    assert drawn[2:] == pytest.approx((row.max().item(), 0.0), abs=1e-6)
    assert lm.draw_next_token_sync([1], top_k=1, temperature=0).log_allowed == 0


def test_draws_from_logits_are_those_from_log_probabilities_and_infinite_ones_are_nan():
    generator = np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(0, 3, (4, 300)).astype(np.float32))
    pools = Pools(np.arange(4), np.ones(4))
    pool_of = np.repeat(np.arange(4), 50)
    uniforms = generator.random(200)
    found = pools.draw(logits, uniforms, pool_of, are_logits=True)
    expected = pools.draw(logits.log_softmax(-1), uniforms, pool_of)
    assert (found[:, 0] == expected[:, 0]).all()
    np.testing.assert_allclose(found[:, 1:4], expected[:, 1:4], rtol=0, atol=1e-5)
    for token_id, pool, uniform in zip(found[:, 0], pool_of, uniforms, strict=True):
        assert token_id in naive_draw(logits[pool].numpy(), None, 1.0, uniform)
    logits[0, 7], logits[1], logits[2, 9] = torch.inf, -torch.inf, torch.nan
    is_nan = np.isnan(pools.draw(logits, uniforms, pool_of, are_logits=True)[:, 4])
    assert is_nan.tolist() == (pool_of < 3).tolist()
