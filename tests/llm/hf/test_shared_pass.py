"""Attention of a pass to random plans, by the operators of each library, against the formula."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend.attention.cascade_plan import CascadePlan
from genlm_backend.attention.forward_batch import TokenChunk, pack, pack_decode
from genlm_backend.backends.hf.attention_interface import TorchCascadeRun
from genlm_backend.backends.mlx import present
from genlm_backend.prefix.kv_pool import KVLayout, KVPool, LayerLayout
from tests.llm.hf.paths_of import rows_in_trees
from tests.naive import naive_attention

NUM_SLOTS, NUM_GROUPS, GROUP, DIM, SCALE = 400, 2, 2, 8, 0.6
BY_MLX = pytest.param(
    "mlx",
    marks=[
        pytest.mark.mlx,
        pytest.mark.skipif(not present.is_present(), reason="needs MLX"),
        pytest.mark.filterwarnings("ignore"),
    ],
)


class OverTorch:
    """A store of one layer and the passes over it, which take and return arrays of numpy."""

    has_softcaps = True

    def __init__(self):
        layer = LayerLayout(NUM_GROUPS, DIM, NUM_GROUPS, DIM, torch.float32, torch.device("cpu"))
        self.pool = KVPool(KVLayout((layer,)), NUM_SLOTS)

    def write(self, slots, keys, values):
        rows = np.concatenate([part.reshape(len(slots), -1) for part in (keys, values)], 1)
        self.pool.write(0, torch.tensor(slots), torch.from_numpy(rows))

    def attended(self, batch, plan, query, keys, values, window, softcap, sinks):
        shared = TorchCascadeRun(self.pool, batch, plan)

        def allows(_, __, new, key):
            return (key <= new) & (key > new - (window or 0))

        mask = shared.mask(allows, window is None, window)
        query, keys, values = map(torch.from_numpy, (query, keys, values))
        shared.take_kv(0, keys, values)
        sinks = None if sinks is None else torch.from_numpy(sinks)
        found = shared.attend(query, keys, values, mask, SCALE, softcap, sinks)
        assert shared.is_complete(1)
        return found.numpy()


class OverMlx(OverTorch):
    """The same by MLX."""

    has_softcaps = False  # models of mlx-lm that have them call no function for attention

    def __init__(self):
        import mlx.core as mx

        from genlm_backend.backends.mlx.mlx_kv_pool import LayerShape, MlxKVPool

        self.pool = MlxKVPool([LayerShape(NUM_GROUPS, DIM, DIM, mx.float32)], NUM_SLOTS)

    def write(self, slots, keys, values):
        import mlx.core as mx

        new = mx.array(keys.swapaxes(0, 1)), mx.array(values.swapaxes(0, 1))
        self.pool.write(np.array(slots), [new])

    def attended(self, batch, plan, query, keys, values, window, softcap, sinks):
        import mlx.core as mx

        from genlm_backend.backends.mlx.mlx_cascade import MlxCascadeRun

        shared = MlxCascadeRun(self.pool, batch, plan)
        mask = shared.mask(keys.shape[2], window, False)
        query, keys, values = map(mx.array, (query, keys, values))
        shared.take_kv(0, keys, values)
        given = None if isinstance(mask, str) else mask
        sinks = None if sinks is None else mx.array(sinks)
        found = shared.attend(query, keys, values, given, SCALE, softcap, sinks)
        assert shared.is_complete(1)
        return np.array(found)


LIBRARIES = {"torch": OverTorch, "torch by the formula": OverTorch, "mlx": OverMlx}


class SlotAllocator:
    """Keys and values of slots, and what new tokens attend to, one by one in float64."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)
        self.kept = {}

    def random(self, *shape):
        return self.generator.normal(size=shape).astype(np.float32)

    def of(self, slots):
        for slot in slots:
            self.kept.setdefault(slot, self.random(2, NUM_GROUPS, DIM))
        return np.stack([self.kept[slot] for slot in slots], 2)

    def expected(self, path, query, keys, values, window, softcap, sinks):
        """Return ``[heads, Q, dim]`` of one row of ``Q`` tokens behind the slots of its path."""
        new, found = np.stack([keys, values]), []
        of_all = np.concatenate([self.of(path), new], 2) if path else new
        for number in range(query.shape[1]):
            seen = of_all[:, :, : len(path) + number + 1]
            found.append(naive_attention(query[:, number], *seen, SCALE, window, softcap, sinks))
        return np.stack(found, 1)


@pytest.mark.parametrize("library", ["torch", "torch by the formula", BY_MLX])
@settings(max_examples=60, deadline=None)
@given(
    rows=rows_in_trees(),
    picks=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=9), max_size=3),
    few_tokens=st.sampled_from([0, 4, 20, 10**6]),
    window=st.sampled_from([None, 1, 7, 30]),
    softcap=st.sampled_from([None, 1.5]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_of_pass_and_later_steps_matches_formula(
    library, rows, picks, few_tokens, window, softcap, has_sinks, seed
):
    over, slots, tree = LIBRARIES[library](), SlotAllocator(seed), rows.tree
    softcap = softcap if over.has_softcaps else None
    sinks = slots.random(NUM_GROUPS * GROUP) if has_sinks else None
    for slot in tree.slot[1:]:
        over.write([slot], *slots.of([slot]).transpose(0, 2, 1, 3))
    nodes, num_new = rows.nodes, rows.num_new

    def passed(batch):
        size = max(num_new)
        query = slots.random(len(nodes), NUM_GROUPS * GROUP, size, DIM)
        keys, values = slots.random(2, len(nodes), NUM_GROUPS, size, DIM)
        with pytest.MonkeyPatch.context() as patch:
            if library == "torch by the formula":
                name = "genlm_backend.attention.torch.torch_ops.fused_operator"
                patch.setattr(name, lambda *_: None)
            given = query, keys, values, window, softcap, sinks
            found = over.attended(batch, plan, *given)
        for row, (node, new) in enumerate(zip(nodes, num_new, strict=True)):
            path = [tree.slot[other] for other in tree.path(node)]
            own = (states[row, :, :new] for states in (query, keys, values))
            wanted = slots.expected(path, *own, window, softcap, sinks)
            np.testing.assert_allclose(found[row, :, :new], wanted, atol=2e-5)
        return keys, values

    plan = CascadePlan.of(tree.paths(nodes), np.array(num_new), few_tokens)
    passed(pack([TokenChunk([1] * new) for new in num_new], tree.paths(nodes)))
    num_new = [1] * len(nodes)
    plan = CascadePlan.of(tree.paths(nodes), np.array(num_new), few_tokens)
    for pick in picks:
        own = np.arange(len(nodes))
        slot_mapping = max(tree.slot) + 1 + own
        keys, values = passed(pack_decode(own, slot_mapping, tree.paths(nodes), plan))
        over.write(slot_mapping.tolist(), keys[:, :, 0], values[:, :, 0])
        for row, slot in enumerate(slot_mapping.tolist()):
            slots.kept[slot] = np.stack([keys[row, :, 0], values[row, :, 0]])
        computed = [tree.add(*pair) for pair in zip(nodes, slot_mapping.tolist(), strict=True)]
        before = [i % len(nodes) for i in pick]
        nodes, num_new = [computed[i] for i in before], [1] * len(before)
        plan = plan.advanced(np.array(before), slot_mapping[before])
    if picks:
        own = np.arange(len(nodes))
        passed(pack_decode(own, own + 1, tree.paths(nodes), plan))
