"""Resampling schemes: means and variances of the copies, zero weights, and wrong arguments."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.errors import OptionError, OptionTypeError
from genlm_backend.resampling import SCHEMES, effective_sample_size, log_mean

NUM_SEEDS = 3000
WEIGHTS = {
    "uneven": ([0.31, 0.02, 0.27, 0.11, 0.29], 5),
    "a zero in the middle": ([0.4, 0.0, 0.35, 0.25], 7),
    "whole copies": ([0.5, 0.125, 0.25, 0.125], 8),
}


def constant(value):
    """Return a generator whose uniform numbers are all equal."""
    own = {"random": lambda _, size=None: value if size is None else np.full(size, value)}
    return type("Constant", (np.random.Generator,), own)(np.random.PCG64(0))


def counts(scheme, log_weights, n, seed):
    """Return the number of copies of each index, after the checks that hold for every scheme."""
    rng = seed if isinstance(seed, np.random.Generator) else np.random.default_rng(seed)
    found = SCHEMES[scheme](log_weights, n, rng)
    assert found.dtype == np.int64
    assert found.shape == (n,)
    assert (np.diff(found) >= 0).all()
    return np.bincount(found, minlength=len(log_weights))


def variances(scheme, weights, n):
    """Return the variance of the copies of each index, by the definition of the scheme."""
    expected = n * np.asarray(weights)
    parts = expected - np.floor(expected + 1e-9)
    if scheme == "multinomial":
        return expected * (1 - weights)
    if scheme == "residual":
        rest = parts.sum()
        return parts * (1 - parts / rest) if rest > 1e-9 else np.zeros(len(parts))
    if scheme == "stratified":  # a Bernoulli draw in each stratum, from the share it covers
        ends = np.cumsum(expected)[:, None]
        begins = ends - expected[:, None]
        strata = np.arange(n)
        shares = (np.minimum(ends, strata + 1) - np.maximum(begins, strata)).clip(0, 1)
        return (shares * (1 - shares)).sum(1)
    return parts * (1 - parts)  # floor or ceil, with the right mean


EACH_SCHEME = pytest.mark.parametrize("scheme", SCHEMES)


@EACH_SCHEME
@pytest.mark.parametrize("case", WEIGHTS)
def test_copies_have_the_expected_mean_and_the_variance_of_the_scheme(scheme, case):
    weights, n = np.array(WEIGHTS[case][0]), WEIGHTS[case][1]
    logs = np.log(weights, where=weights > 0, out=np.full(len(weights), -math.inf))
    rows = np.array([counts(scheme, logs, n, seed) for seed in range(NUM_SEEDS)])
    wanted = variances(scheme, weights, n)
    errors = np.sqrt(wanted / NUM_SEEDS)
    assert (abs(rows.mean(0) - n * weights) <= 4 * errors + 1e-9).all()
    # The variance of a sample variance, by the fourth central moment of the sample itself.
    found, fourth = rows.var(0), ((rows - rows.mean(0)) ** 4).mean(0)
    errors = np.sqrt(np.maximum(fourth - found**2, 0) / NUM_SEEDS)
    assert (abs(found - wanted) <= 4 * errors + 5e-3).all()
    assert (wanted <= variances("multinomial", weights, n) + 1e-12).all()


log_weights = st.lists(st.floats(-30, 30) | st.just(-math.inf), min_size=1, max_size=12)
log_weights = log_weights.filter(lambda values: max(values) > -math.inf)
sizes, seeds = st.integers(0, 40), st.integers(0, 2**32)
names = st.sampled_from(list(SCHEMES))
extremes = st.sampled_from([0.0, np.nextafter(1, 0)]).map(constant)


@given(names, log_weights, sizes, st.one_of(seeds, extremes))
def test_a_zero_weight_has_no_copy_and_equal_seeds_give_equal_copies(name, values, n, seed):
    padded = [-math.inf, *values, -math.inf]
    found = counts(name, padded, n, seed)
    assert not found[np.isneginf(padded)].any()
    assert (found == counts(name, padded, n, seed)).all()


@given(log_weights, sizes, seeds)
def test_copies_are_within_the_bounds_of_the_scheme(values, n, seed):
    expected = n * np.exp(values) / np.exp(values).sum()
    low, high = np.floor(expected - 1e-8), np.ceil(expected + 1e-8)
    slack = {"systematic": (0, 0), "ssp": (0, 0), "stratified": (1, 1), "residual": (0, n)}
    for name, (below, above) in slack.items():
        found = counts(name, values, n, seed)
        assert ((found >= low - below) & (found <= high + above)).all()


FAR_APART = [
    [-math.inf, -1e308, -math.inf],
    [1e308, -1e308, -math.inf],
    [0.0, -800.0],
    np.array([3]),
]


@EACH_SCHEME
@pytest.mark.parametrize("values", FAR_APART)
def test_one_index_with_all_weight_has_all_copies(scheme, values):
    assert counts(scheme, values, 9, 0)[np.argmax(values)] == 9
    assert effective_sample_size(values) == 1
    assert log_mean(values) == pytest.approx(max(values) - math.log(len(values)))


@given(log_weights)
def test_effective_sample_size_and_log_mean_agree_with_plain_formulas(values):
    weights = np.exp(values)
    size = weights.sum() ** 2 / (weights**2).sum()
    assert effective_sample_size(values) == pytest.approx(size)
    assert log_mean(values) == pytest.approx(math.log(weights.mean()), abs=1e-12)


WRONG = [
    ("log_weights", [0.0, math.nan], OptionError),
    ("log_weights", [math.inf, 0.0], OptionError),
    ("log_weights", [[0.0, 1.0]], OptionTypeError),
    ("log_weights", 0.5, OptionTypeError),
    ("log_weights", [True, False], OptionTypeError),
    ("log_weights", None, OptionTypeError),
    ("n", -1, OptionError),
    ("n", 2.0, OptionTypeError),
    ("rng", np.random.RandomState(0), OptionTypeError),
    ("rng", 0, OptionTypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), WRONG)
def test_a_wrong_argument_raises_an_error_that_names_it(name, value, error):
    given = {"log_weights": [0.0, 1.0], "n": 2, "rng": np.random.default_rng(0), name: value}
    functions = [partial(function, **given) for function in SCHEMES.values()]
    if name == "log_weights":
        functions += [partial(effective_sample_size, value), partial(log_mean, value)]
    for function in functions:
        with pytest.raises(error, match=rf"\b{name}\b"):
            function()


@EACH_SCHEME
@pytest.mark.parametrize("values", [np.zeros(0), [-math.inf], [-math.inf, -math.inf]])
def test_weights_without_any_mass_have_size_zero_and_are_not_resampled(scheme, values):
    assert effective_sample_size(values) == 0
    assert log_mean(values) == -math.inf
    with pytest.raises(OptionError, match="log_weights has no element above -inf"):
        SCHEMES[scheme](values, 3, np.random.default_rng(0))
