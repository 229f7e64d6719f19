"""Every kind of trie against prefixes counted by hand."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend import ParallelTokenCharacterTrie, Token, TokenCharacterTrie
from genlm_backend.errors import OptionError, OptionTypeError, WeightsError
from genlm_backend.trie import sequential
from tests.naive import naive_trie_weights
from tests.trie.reference import node_of, nodes_by_prefix
from tests.trie.strategies import EOS, vocabularies, weights

KINDS = {
    "sequential": TokenCharacterTrie,
    "parallel": lambda decode: ParallelTokenCharacterTrie(decode, device="cpu"),
}
OPERATIONS = ["sum", "max", "log_sum"]
METHODS = {"sum": "weight_sum", "max": "weight_max", "log_sum": "log_weight_sum"}


def close(operation, expected, found, scale):
    """Within float32's rounding of the values that went in."""
    if np.isnan(expected) or np.isinf(expected):
        return found == expected or (np.isnan(expected) and np.isnan(found))
    if operation == "max":
        return np.float32(expected) == np.float32(found)
    return abs(expected - found) <= 1e-5 * scale


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


@settings(max_examples=60, deadline=None)
@given(st.data())
def check_against_brute_force(make, data):
    decode = data.draw(vocabularies)
    trie = make(decode)
    nodes = nodes_by_prefix(trie)
    assert trie.num_nodes == len(trie.children) == len(nodes) + len(decode)
    batch = [data.draw(weights(len(decode))) for _ in range(data.draw(st.integers(1, 3)))]
    sizes = [naive_trie_weights(decode, np.abs(ws), "sum") for ws in batch]
    for operation in OPERATIONS:
        with np.errstate(all="ignore"):
            wanted = [naive_trie_weights(decode, ws, operation) for ws in batch]
        found = getattr(trie, f"batch_{METHODS[operation]}")(batch)
        assert found.shape == (len(batch), trie.num_nodes)
        assert found.dtype == np.float32
        for ws, by_prefix, size, row in zip(batch, wanted, sizes, found, strict=True):
            assert nodes.keys() == by_prefix.keys()
            np.testing.assert_array_equal(row[trie.leaves], ws)
            for prefix, expected in by_prefix.items():
                scale = max(1.0, abs(expected)) if operation == "log_sum" else size[prefix]
                value = row[nodes[prefix]]
                assert close(operation, expected, value, scale), (prefix, expected, value)
        single = getattr(trie, METHODS[operation])(batch[0])
        np.testing.assert_allclose(single, found[0], rtol=1e-5, atol=1e-30)


def test_weights_of_every_prefix_match_brute_force(make):
    check_against_brute_force(make)


@settings(max_examples=40, deadline=None)
@given(vocabularies)
def check_structure(make, decode):
    trie = make(decode)
    twin = make(list(decode))
    assert trie.root == trie.num_nodes - 1
    seen = []
    for node, children in enumerate(trie.children):
        assert children == twin.children[node]
        assert all(child < node for child in children.values())
        seen += children.values()
    assert sorted(seen) == list(range(trie.num_nodes - 1))
    for position, item in enumerate(decode):
        key = (bytes(item), item.token_id) if isinstance(item, Token) else item
        leaf = trie.word2leaf[key]
        assert leaf == trie.leaves[position]
        assert trie.leaf2word[leaf] == key
        assert trie.children[leaf] == {}
        assert trie.children[node_of(trie, item)][None, position] == leaf
        assert trie.node2prefix[leaf] == trie.node2prefix[node_of(trie, item)] == list(item)
    assert len(trie.word2leaf) == len(decode)


def test_tree_structure_follows_the_letters_of_the_tokens(make):
    check_structure(make)


@settings(max_examples=40, deadline=None)
@given(vocabularies, st.data())
def check_flat_views(make, decode, data):
    """A sum by hand over the flat views is the trie's own."""
    trie = make(decode)
    ws = np.nan_to_num(data.draw(weights(len(decode))), nan=1, posinf=2, neginf=-3)
    sums = np.zeros(trie.num_nodes)
    assert trie.idx_to_leaf.dtype == trie.ordering.dtype == np.int32
    assert trie.idx_to_leaf.shape == (len(decode), 2)
    for position, leaf in trie.idx_to_leaf:
        sums[leaf] = ws[position]
        assert len(trie.jump[leaf]) == 0
    for node in trie.ordering:
        children = trie.jump[node]
        assert children.dtype == np.int32
        assert children.tolist() == sorted(trie.children[node].values())
        sums[node] = sums[children].sum()
    assert len(trie.ordering) + len(decode) == trie.num_nodes == len(trie.jump)
    np.testing.assert_allclose(trie.weight_sum(ws), sums, rtol=1e-5, atol=1e-5 * np.abs(ws).sum())


def test_sums_over_the_flat_views_match_the_trie(make):
    check_flat_views(make)
    trie = make([b"a", b"ab"])
    assert [part.tolist() for part in trie.jump[-2:]] == [trie.jump[i].tolist() for i in (-2, -1)]
    with pytest.raises(IndexError):
        trie.jump[trie.num_nodes]


def test_children_are_a_sequence_and_prefixes_a_mapping(make):
    trie = make([b"a", b"ab", b"b"])
    assert trie.children[-1] == trie.children[trie.root] == trie.children[np.int64(trie.root)]
    assert trie.children[:2] == [trie.children[0], trie.children[1]]
    assert set(trie.children[trie.root]) == {ord("a"), ord("b")}
    assert dict(trie.node2prefix.items())[trie.root] == []
    with pytest.raises(IndexError):
        trie.children[trie.num_nodes]
    with pytest.raises(KeyError):
        trie.node2prefix[trie.num_nodes]


def test_tokens_with_equal_bytes_are_separate_leaves_of_one_node(make):
    decode = [Token(5, b"a"), Token(3, b"a"), Token(4, b""), Token(1, b"")]
    trie = make(decode)
    total = trie.weight_sum(np.array([1, 2, 4, 8], np.float32))
    assert total[trie.root] == 15
    assert total[trie.children[trie.root][ord("a")]] == 3
    assert trie.children[trie.root][None, 2] == trie.word2leaf[b"", 4]
    assert trie.children[trie.root][None, 3] == trie.word2leaf[b"", 1]


def test_an_end_marker_is_a_letter_of_its_own(make):
    trie = make([b"a", EOS])
    ws = trie.weight_sum([0.25, 0.75])
    assert ws[trie.children[trie.root][EOS]] == ws[trie.word2leaf[EOS]] == 0.75


def test_vocabulary_of_one_token_has_its_weight_at_every_node(make):
    for item in (b"", b"a", Token(0, b"ab"), "é"):
        trie = make([item])
        assert trie.num_nodes == len(item) + 2
        for operation in ("weight_sum", "weight_max", "log_weight_sum"):
            assert getattr(trie, operation)(np.array([-2.5])).tolist() == [-2.5] * trie.num_nodes


def test_token_of_100_000_letters_causes_no_recursion_error(make):
    trie = make([b"a" * 100_000, b"a" * 99_999 + b"b"])
    assert trie.num_nodes == 1 + 99_999 + 2 + 2
    assert trie.weight_sum([1.0, 2.0])[trie.root] == 3.0
    assert len(trie.node2prefix[trie.word2leaf[b"a" * 100_000]]) == 100_000


def test_sums_are_correct_with_a_token_of_1000_letters(make):
    decode = [bytes([97 + i % 7]) * (i + 1) for i in range(60)] + [b"ab" * 500]
    trie = make(decode)
    ws = np.exp(np.random.default_rng(0).normal(0, 5, len(decode))).astype(np.float32)
    found, nodes = trie.weight_sum(ws), nodes_by_prefix(trie)
    for prefix, expected in naive_trie_weights(decode, ws, "sum").items():
        assert found[nodes[prefix]] == pytest.approx(expected, rel=1e-5)


def test_weight_max_of_log_probabilities_may_be_minus_inf(make):
    trie = make([b"ab", b"ac", b"d", b"e"])
    ws = np.array([-5.0, -3.0, -np.inf, -np.inf], np.float32)
    largest = trie.weight_max(ws)
    assert largest[node_of(trie, b"a")] == largest[trie.root] == -3
    assert largest[node_of(trie, b"d")] == -np.inf
    assert trie.weight_max(np.full(4, -np.inf))[trie.root] == -np.inf


def test_nan_weight_gives_nan_only_on_the_path_to_its_token(make):
    trie = make([b"ab", b"ac", b"b"])
    for method in ("weight_sum", "weight_max", "log_weight_sum"):
        for others in (1.0, np.inf, -np.inf):
            found = getattr(trie, method)(np.array([np.nan, others, others], np.float32))
            undefined = {trie.root, *(node_of(trie, p) for p in (b"a", b"ab")), trie.leaves[0]}
            assert set(np.flatnonzero(np.isnan(found))) == undefined


def test_log_sums_are_correct_if_probabilities_underflow(make):
    trie = make([b"ab", b"ac", b"b"])
    ws = np.array([-5000.0, -5000.0, 0.0], np.float32)
    found = trie.log_weight_sum(ws)
    assert found[node_of(trie, b"a")] == pytest.approx(-5000 + np.log(2), abs=1e-3)
    assert found[trie.root] == 0
    assert trie.log_weight_sum([-np.inf, -np.inf, 1.0])[node_of(trie, b"a")] == -np.inf
    assert trie.log_weight_sum([np.inf, 0.0, 1.0])[trie.root] == np.inf


def test_small_masses_among_large_ones_keep_their_precision(make):
    decode = [bytes([a, b]) for a in range(256) for b in range(256)]
    rng = np.random.default_rng(0)
    ws = np.exp(rng.normal(0, 12, len(decode))).astype(np.float32)
    trie, reference = make(decode), ws.astype(np.float64).reshape(256, 256)
    found = trie.weight_sum(ws)
    nodes = [trie.children[trie.root][a] for a in range(256)]
    np.testing.assert_allclose(found[nodes], reference.sum(1), rtol=1e-6)
    assert found[trie.root] == pytest.approx(reference.sum(), rel=1e-6)


def test_mass_sum_equals_weight_sum(make):
    trie = make([b"a", b"b"])
    ws = np.array([[1.0, 2.0]], np.float32)
    np.testing.assert_array_equal(trie.mass_sum(ws[0]), trie.weight_sum(ws[0]))
    np.testing.assert_array_equal(trie.batch_mass_sum(ws), trie.batch_weight_sum(ws))


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient", [False, True])
def test_tensors_of_every_precision_give_arrays(make, dtype, gradient):
    trie = make([b"ab", b"ac", b"b"])
    ws = torch.tensor([0.25, 0.5, 2.0], dtype=dtype, requires_grad=gradient)
    expected = np.float64 if dtype == torch.float64 else np.float32
    for result in (trie.weight_sum(ws), trie.batch_weight_sum(ws[None])[0]):
        assert isinstance(result, np.ndarray)
        assert result.dtype == expected
        assert result[trie.root] == 2.75


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float16, np.float32),
        (np.longdouble, np.float64),
        (np.int64, np.float64),
        (np.bool_, np.float32),
        (np.uint8, np.float64),
        (">f4", np.float32),
    ],
)
def test_arrays_of_every_dtype_and_layout_are_accepted(make, dtype, expected):
    trie = make([b"ab", b"ac", b"b"])
    ws = np.array([1, 0, 1], dtype)
    ws.flags.writeable = False
    assert trie.weight_sum(ws)[trie.root] == 2
    assert trie.weight_sum(ws).dtype == expected
    strided = np.array([[1, 9], [0, 9], [1, 9]], dtype)[:, 0]
    assert trie.weight_max(strided)[node_of(trie, b"a")] == 1
    assert trie.weight_sum([1, 0, 1])[trie.root] == 2


def test_batch_may_mix_tensors_arrays_and_lists(make):
    trie = make([b"a", b"b"])
    found = trie.batch_weight_sum([torch.tensor([1.0, 2.0]), np.array([3.0, 4.0]), [5, 6]])
    assert found[:, trie.root].tolist() == [3, 7, 11]
    assert found.dtype == np.float64
    assert trie.batch_weight_max([]).shape == (0, trie.num_nodes)
    nothing = trie.batch_weight_sum(np.empty((0, 2)))
    assert (nothing.shape, nothing.dtype) == ((0, trie.num_nodes), np.float64)


def test_precision_of_a_row_does_not_depend_on_other_rows(make):
    trie = make([b"a", b"ab", b"b"])
    single, double = np.array([1, 2, 3], np.float32), np.array([1e-15, 1, 0])
    for operation in OPERATIONS:
        rows = trie.evaluate_rows(operation, [single, double, single])
        assert [row.dtype for row in rows] == [np.float32, np.float64, np.float32]
        for row, ws in zip(rows, (single, double, single), strict=True):
            np.testing.assert_array_equal(row, trie.evaluate_rows(operation, [ws])[0])


def test_arrays_of_any_layout_trigger_no_recompilation():
    from genlm_backend.trie.reachability import sweep_sum

    trie = TokenCharacterTrie([b"ab", b"a"])
    trie.prepare()
    before = len(sweep_sum.signatures)  # pyright: ignore
    ws = np.array([1, 2], np.float32)
    frozen, odd = ws.copy(), np.frombuffer(b"x" + ws.tobytes(), np.uint8)[1:].view(np.float32)
    frozen.flags.writeable = False
    assert not odd.flags.aligned
    for kind in (frozen, odd, np.stack([ws, ws])[:, ::-1][0], torch.from_numpy(ws)):
        assert trie.weight_sum(kind)[trie.root] == 3
    trie.batch_weight_sum(np.stack([ws, ws]).T.copy().T)
    assert len(sweep_sum.signatures) == before  # pyright: ignore


def test_tries_can_be_copied(make):
    trie = make([Token(3, b"ab"), Token(1, b"a"), Token(2, b"ab")])
    ws = np.array([1, 2, 4], np.float32)
    for twin in (copy.deepcopy(trie), pickle.loads(pickle.dumps(trie))):
        np.testing.assert_array_equal(twin.weight_sum(ws), trie.weight_sum(ws))
        assert twin.word2leaf == trie.word2leaf
        assert twin.children[twin.root] == trie.children[trie.root]


def test_appending_to_the_callers_list_does_not_change_the_trie(make):
    decode = [b"a", b"b"]
    trie = make(decode)
    decode.append(b"c")
    assert trie.weight_sum([1.0, 2.0])[trie.root] == 3


def test_double_precision_is_kept(make):
    trie = make([b"a", b"ab", b"b"])
    assert trie.weight_sum(np.array([1.0, 1e-15, 0.0]))[trie.root] == 1 + 1e-15


def test_sums_of_single_precision_lose_no_small_weights():
    """Each of these is lost when it is added to one in float32; all together are not."""
    trie = TokenCharacterTrie([bytes([i]) for i in range(256)])
    ws = np.array([1, *[2**-25] * 255], np.float32)
    assert trie.weight_sum(ws)[trie.root] == np.float32(1 + 255 * 2**-25)
    log_sum = trie.log_weight_sum(np.log(ws))[trie.root]
    assert log_sum == pytest.approx(np.log1p(255 * 2**-25), rel=1e-6)


def test_changing_a_result_changes_neither_trie_nor_weights(make):
    trie = make([b"a", b"b"])
    ws = np.array([1.0, 2.0], np.float32)
    first = trie.weight_sum(ws)
    first[:] = 0
    assert trie.weight_sum(ws)[trie.root] == 3
    assert ws.tolist() == [1, 2]


def test_as_tensor_gives_tensors_of_equal_values():
    decode = [Token(i, word) for i, word in enumerate([b"ab", b"ac", b"b", b"ab"])]
    trie = ParallelTokenCharacterTrie(decode, device="cpu", as_tensor=True)
    plain = TokenCharacterTrie(decode)
    ws = torch.rand(3, 4)
    for method in ("weight_sum", "weight_max", "log_weight_sum"):
        batch = getattr(trie, f"batch_{method}")(ws)
        assert isinstance(batch, torch.Tensor)
        np.testing.assert_allclose(batch.numpy(), getattr(plain, f"batch_{method}")(ws), rtol=1e-6)
        row = getattr(trie, method)(ws[0])
        torch.testing.assert_close(row, batch[0])


def test_large_batches_in_parts_give_the_same_result(monkeypatch):
    from genlm_backend.trie import parallel

    decode = [bytes([a, b]) for a in range(40) for b in range(40)]
    trie = ParallelTokenCharacterTrie(decode, device="cpu")
    ws = np.random.default_rng(0).random((17, len(decode)))
    whole = trie.batch_weight_sum(ws)
    monkeypatch.setattr(parallel, "MAX_ELEMENTS", 3 * trie.num_nodes)
    np.testing.assert_allclose(trie.batch_weight_sum(ws), whole, rtol=1e-12)


def test_device_without_sparse_products_gives_the_same_result(monkeypatch):
    decode = [bytes([a, b]) for a in range(40) for b in range(40)]
    trie = ParallelTokenCharacterTrie(decode, device="cpu")
    ws = np.random.default_rng(0).random((5, len(decode))).astype(np.float32)
    expected = trie.batch_weight_sum(ws)
    monkeypatch.setattr(trie, "has_sparse_product", False)
    np.testing.assert_allclose(trie.batch_weight_sum(ws), expected, rtol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
def test_number_of_threads_does_not_change_results(monkeypatch, num_threads):

    monkeypatch.setattr(sequential, "NODES_PER_THREAD", 1)
    decode = [bytes([a, b]) for a in range(20) for b in range(20)]
    ws = np.random.default_rng(0).random((11, len(decode))).astype(np.float32)
    alone = np.stack([TokenCharacterTrie(decode).weight_sum(row) for row in ws])
    trie = TokenCharacterTrie(decode, num_threads=num_threads)
    np.testing.assert_array_equal(trie.batch_weight_sum(ws), alone)


def test_an_error_on_a_helping_thread_is_raised():
    from genlm_backend.runtime.together import in_threads

    def fail(part):
        if part.start:
            raise ZeroDivisionError("there")

    with pytest.raises(ZeroDivisionError, match="there"):
        in_threads(fail, 4, 2)


@given(vocabularies)
def test_tokens_below_a_node_are_those_of_its_leaves(decode):
    trie = TokenCharacterTrie(decode)
    below = [set() for _ in range(trie.num_nodes)]
    for position, leaf in enumerate(trie.leaves.tolist()):
        below[leaf] = {position}
    for node in range(trie.num_nodes):  # children come first
        below[node].update(*(below[child] for child in trie.children[node].values()))
        found = trie.tokens_below(node)
        assert found.dtype == np.int32
        assert found.tolist() == sorted(below[node])
    ws = np.random.default_rng(0).random(len(decode))
    sums = trie.weight_sum(ws)
    for node in range(trie.num_nodes):
        assert np.isclose(ws[trie.tokens_below(node)].sum(), sums[node])


def test_tokens_with_a_prefix_are_those_below_its_node():
    trie = TokenCharacterTrie([b"ab", b"a", b"abc", b"b", b"", b"ab"[:1] + b"b"[:0] + b"x"])
    for prefix, tokens in ((b"", range(6)), (b"a", [0, 1, 2, 5]), (b"ab", [0, 2]), (b"abc", [2])):
        assert trie.tokens_with(prefix).tolist() == list(tokens)
        assert list(trie.node2prefix[trie.node(prefix)]) == list(prefix)
    assert trie.node(b"abcd") is trie.node(b"c") is None
    for ask in (trie.node, trie.tokens_with):
        with pytest.raises(TypeError, match="prefix must not be a string"):
            ask("ab")
    for prefix in (b"abcd", b"c", b"bb"):
        found = trie.tokens_with(prefix)
        assert (found.dtype, found.shape) == (np.int32, (0,))


@pytest.mark.parametrize("is_torch", [False, True])
def test_mass_of_a_prefix_sums_the_tokens_that_begin_with_it(make, is_torch):
    words = [b"the", b"then", b"a", b" th"]
    trie, ws = make([Token(i, word) for i, word in enumerate(words)]), np.array([1, 2, 4, np.inf])
    ws = torch.from_numpy(ws) if is_torch else ws
    sums, batch = trie.weight_sum(ws), trie.batch_weight_sum([ws, 2 * ws, 3 * ws])
    masses = naive_trie_weights(words, ws, "sum")
    for prefix in (b"", b"th", b"then", b" ", b"x", b"thenx", b"tha"):
        mass = masses.get(tuple(prefix), 0)
        one, many = trie.mass(sums, prefix), trie.mass(batch, prefix)
        assert [float(one), *many.tolist()] == [mass, mass, 2 * mass, 3 * mass]
        assert (type(many), many.dtype) == (type(batch), batch.dtype)
    with pytest.raises(OptionTypeError, match=r"prefix.encode\(\)"):
        trie.mass(sums, "th")
    with pytest.raises(ValueError, match="negative numbers"):
        trie.mass(-sums - 1, b"no token begins so")
    with pytest.raises(WeightsError, match=r"one number per node; got the shape \[4\]"):
        trie.mass(ws, b"th")


def test_tokens_below_a_missing_node_raises_option_error():
    trie = TokenCharacterTrie([b"a", b"ab"])
    for node in (-1, trie.num_nodes):
        with pytest.raises(OptionError, match="node"):
            trie.tokens_below(node)
    with pytest.raises(OptionTypeError, match="node"):
        trie.tokens_below(1.5)
