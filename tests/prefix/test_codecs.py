"""Number formats of keys and values, against their formulas, written down a second time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm_backend.errors import OptionError
from genlm_backend.prefix import codecs
from genlm_backend.prefix.codecs import KV_CACHE_DTYPES, codec_for, hadamard
from genlm_backend.prefix.kv_pool import KVLayout, LayerLayout

FLOAT32 = torch.float32


def rounded(codec, rows):
    codes = codec.encode(rows)
    assert [(c.shape[1], c.dtype) for c in codes] == list(codec.columns())
    assert sum(c[0].nbytes for c in codes) == codec.bytes_per_token
    return codec.decode(codes)


def vectors():
    rows = st.lists(st.floats(-1e4, 1e4, width=32), min_size=24, max_size=24)
    return st.lists(rows, min_size=1, max_size=4).map(lambda r: torch.tensor(r, dtype=FLOAT32))


@given(vectors())
def test_int8_rounds_to_the_nearest_multiple_of_the_heads_scale(rows):
    found = rounded(codec_for("int8", 24, 8, FLOAT32), rows).numpy()
    by_head = rows.numpy().astype(np.float64).reshape(-1, 8)
    scales = np.abs(by_head).max(1, keepdims=True) / 127
    errors = np.abs(found.reshape(-1, 8) - by_head)
    assert (errors <= scales * 0.5001 + 1e-30).all()
    multiples = found.reshape(-1, 8) / np.where(scales > 0, scales, 1)
    assert np.abs(multiples - np.rint(multiples)).max() < 1e-4
    assert np.abs(multiples).max() < 127.01


@given(vectors())
def test_uint4_root_mean_square_error_is_at_most_about_one_step(rows):
    """The range that is tried first cuts nothing, and what is chosen has no larger error."""
    codec = codec_for("uint4", 24, 8, FLOAT32)
    found = rounded(codec, rows).numpy().astype(np.float64)
    matrix = hadamard(8, torch.device("cpu")).numpy().astype(np.float64)
    turned = rows.numpy().astype(np.float64).reshape(-1, 8) @ matrix
    low, high = turned.min(1), turned.max(1)
    step = np.maximum((high - low) / 15, np.maximum(np.abs(low), np.abs(high)) / 125)
    worst = 8 * (step * 1.05 + 1e-30) ** 2  # the zero point is rounded too: a step, and not half
    errors = np.square((found - rows.numpy()).reshape(-1, 8)).sum(1)
    assert (errors <= worst).all()


def test_uint4_error_on_normal_vectors_is_that_of_sixteen_levels():
    torch.manual_seed(0)
    rows = torch.randn(2000, 128)
    rows[:, 5] += 40  # a channel apart, as keys have them
    mean = torch.zeros(128)
    mean[5] = 40
    errors = {
        name: float((rounded(codec_for("uint4", 128, 64, FLOAT32, m), rows) - rows).square().mean())
        for name, m in (("with", mean), ("without", None))
    }
    assert errors["with"] < 0.0075  # a range of four deviations in fifteen steps: 0.0059
    assert errors["with"] < errors["without"] < 0.2


def test_uint4_clips_outliers_if_that_lowers_the_mean_error(monkeypatch):
    torch.manual_seed(0)
    rows, codec = torch.randn(2000, 128), codec_for("uint4", 128, 64, FLOAT32)

    def error():
        return float((rounded(codec, rows) - rows).square().mean())

    chosen = error()
    monkeypatch.setattr(codecs, "_SHARES", (1.0,))
    assert chosen < 0.95 * error()


@pytest.mark.parametrize(
    ("kept", "bytes_per_token"),
    [(None, 1024), ("bfloat16", 512), ("float16", 512), ("int8", 272), ("uint4", 152)],
)
def test_bytes_per_token_of_four_heads_of_64_elements(kept, bytes_per_token):
    """uint4: 128 bytes of elements, and for each of 8 groups 2 of a scale and one of a zero."""
    assert codec_for(kept, 256, 64, FLOAT32).bytes_per_token == bytes_per_token
    layer = LayerLayout(2, 64, 2, 64, FLOAT32, torch.device("cpu"))
    layout = KVLayout((layer,) * 3).kept_as(kept)
    assert layout.bytes_per_slot == 3 * bytes_per_token


@pytest.mark.parametrize("kept", KV_CACHE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float64, FLOAT32, torch.bfloat16, torch.float16])
def test_numbers_of_any_size_come_back_within_the_formats_error(kept, dtype):
    codec = codec_for(kept, 16, 8, dtype)
    for size in (0.0, 1e-3, 1.0, 6e4):
        rows = (torch.linspace(-size, size, 48, dtype=torch.float64).view(3, 16)).to(dtype)
        found = rounded(codec, rows)
        assert found.dtype is dtype
        bound = {"int8": 0.006, "uint4": 0.15}.get(kept, 0.005) * size
        torch.testing.assert_close(found.double(), rows.double(), rtol=0, atol=bound)


def test_out_of_range_numbers_become_the_largest_finite_number():
    rows = torch.tensor([[1e6, -1e6, torch.inf, -torch.inf, torch.nan, 1.0, 0.0, 2.0]])
    found = rounded(codec_for("float16", 8, 4, FLOAT32), rows)[0].tolist()
    assert found[:4] == [65504, -65504, np.inf, -np.inf]
    assert np.isnan(found[4])
    assert found[5:] == [1, 0, 2]


def test_format_equal_to_the_models_dtype_copies_nothing():
    rows = torch.randn(3, 8, dtype=torch.bfloat16)
    codec = codec_for("bfloat16", 8, 4, torch.bfloat16)
    assert codec.is_exact
    assert rounded(codec, rows) is rows


def test_uint4_refuses_heads_of_an_odd_number_of_elements():
    layer = LayerLayout(2, 5, 2, 5, FLOAT32, torch.device("cpu"))
    with pytest.raises(OptionError, match="even number of elements, got 5"):
        KVLayout((layer,)).kept_as("uint4")
    assert KVLayout((layer,)).kept_as("int8").bytes_per_slot == 4 * (5 + 4)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_hadamard_matrices_are_their_own_inverses(size):
    matrix = hadamard(size, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix, torch.eye(size))
    assert np.allclose(matrix.abs().numpy(), size**-0.5)
