"""Decode steps from arrays: packed, and read as the last step was, against the bare model."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm_backend import AsyncTransformer
from genlm_backend.attention.packing import Span, pack, pack_step
from genlm_backend.attention.reading import Reading
from genlm_backend.attention.shared_pass import Indices, PassMasks
from genlm_backend.attention.torch import GatherAttend, SharedAttend
from genlm_backend.attention.torch.torch_operators import TORCH
from genlm_backend.backends.hf.state_trial import paths_of
from genlm_backend.backends.hf.twin import Twin
from genlm_backend.prefix import KVStore
from tests.llm import families
from tests.llm.conftest import fresh_row, word_tokenizer
from tests.llm.hf.paths_of import Particles, rows_in_trees

DEVICE = torch.device("cpu")


@torch.inference_mode()
def run(model, batch, attend):
    """Run a packed batch; return the rows at its outputs."""
    with attend.attending(batch, model) as given:
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, **given}
        inputs[families.CACHE] = inputs.pop("cache")
        logits = model(**inputs).logits
    return logits[batch.output_rows, batch.output_columns].float().log_softmax(-1)


MODELS = {
    **{name: families.PER_TOKEN[name] for name in ("llama", "gemma2", "gemma3", "gpt-oss")},
    # Chunks, and nothing by the number of columns.
    "llama4": lambda: changed(families.PER_TOKEN["llama4-tuned"](), attn_temperature_tuning=False),
}


def changed(config, **changes):
    """A config with other values."""
    vars(config).update(changes)
    return config


@pytest.mark.parametrize("few_tokens", [4, 30])
@pytest.mark.parametrize("kind", [SharedAttend, GatherAttend])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
def test_steps_that_go_on_from_one_another_give_the_bare_models_rows(
    name, kind, few_tokens, monkeypatch
):
    model, generator = families.of(MODELS[name]()), random.Random(name)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        store = KVStore(lm._evaluator.passes.cache.layout, 300)
    attend = SharedAttend(store, few_tokens) if kind is SharedAttend else GatherAttend(store)
    twin = Twin(model, names_ours=kind is SharedAttend).module
    num_made, made = [], Indices.of
    monkeypatch.setattr(Indices, "of", lambda *given: num_made.append(1) or made(*given))
    prompt = generator.choices(range(families.VOCAB), k=20)
    particles = Particles(
        lambda batch: run(twin, batch, attend), attend, prompt, [20, 20, 20, 5, 20, 20, 9, 0]
    )
    num_rows = 8
    for _ in range(7):
        token_ids = generator.choices(range(families.VOCAB), k=num_rows)
        rows = particles.step(token_ids)
        for row, context in zip(rows, particles.contexts, strict=True):
            torch.testing.assert_close(row, fresh_row(model, context), rtol=0, atol=3e-5)
        picked = generator.choices(range(num_rows), k=generator.randint(4, 9))
        particles.pick(picked)
        num_rows = len(picked)
    # The prompt's, and those of the first step: of one device.
    assert len(num_made) == (2 if kind is SharedAttend else 0)


def test_steps_of_others_in_between_do_not_mix_with_those_that_go_on():
    model, generator = families.make("llama"), random.Random(0)
    with AsyncTransformer(model, word_tokenizer()) as lm:
        attend = SharedAttend(KVStore(lm._evaluator.passes.cache.layout, 300), 4)
    both, twin = [], Twin(model, names_ours=True).module
    for first_slot in (1, 150):
        prompt = generator.choices(range(families.VOCAB), k=12)
        starts = [12, 12, 12, 5]
        given = (lambda batch: run(twin, batch, attend)), attend, prompt, starts
        both.append(Particles(*given, first_slot))
    for particles in (both * 4)[:-1] + both[:1]:
        rows = particles.step(generator.choices(range(families.VOCAB), k=4))
        for row, context in zip(rows, particles.contexts, strict=True):
            torch.testing.assert_close(row, fresh_row(model, context), rtol=0, atol=3e-5)
        particles.pick(generator.choices(range(4), k=4))


@settings(max_examples=150, deadline=None)
@given(
    rows_in_trees(num_new=(1,)),
    st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=9), min_size=1, max_size=4),
    st.sampled_from([0, 4, 20, 10**6]),
)
def test_tensors_that_are_stepped_are_those_of_the_reading(rows, picks, few_tokens):
    tree, nodes, _ = rows
    batch = step_of(tree, nodes)
    reading = Reading.of(batch.past, batch.num_new, few_tokens)
    indices = Indices.of(TORCH, reading, DEVICE)
    masks = PassMasks.of(TORCH, None, batch, reading, 2, DEVICE)
    for pick in picks:
        computed = [tree.add(node, 1000 + len(tree.slot)) for node in nodes]
        before = [i % len(nodes) for i in pick]
        nodes = [computed[i] for i in before]
        slots = np.array([tree.slot[node] for node in nodes])
        reading = reading.advanced(np.array(before), slots)
        batch = step_of(tree, nodes)
        indices = indices.advanced(reading, reading.advance)
        masks = masks.advanced(reading, reading.advance)
        anew = Indices.of(TORCH, reading, DEVICE)
        assert torch.equal(indices.rest, anew.rest)
        for own, part in zip(indices.parts, anew.parts, strict=True):
            assert (own.rows is None) == (part.rows is None)
            assert own.rows is None or torch.equal(own.rows, part.rows)
            assert isinstance(own.slots, slice) == isinstance(part.slots, slice)
            assert np.array_equal(np.arange(5000)[own.slots], np.arange(5000)[part.slots])
            assert own.num_tokens == part.num_tokens
        wanted = PassMasks.of(TORCH, None, batch, reading, 2, DEVICE)
        assert (masks.rest is None) == (wanted.rest is None)
        assert masks.rest is None or torch.equal(masks.rest, wanted.rest)
        assert (masks.parts, masks.is_read) == (wanted.parts, wanted.is_read)
        assert masks.is_causal == wanted.is_causal


def step_of(tree, nodes):
    """A packed step of rows that end in some nodes."""
    past, own = tree.paths(nodes), np.arange(len(nodes))
    return pack_step(own, 3000 + own, past, None)


@given(rows_in_trees(num_new=(1,)))
def test_a_step_from_arrays_is_packed_as_one_from_spans(rows):
    tree, nodes, _ = rows
    past, num_rows = tree.paths(nodes), len(nodes)
    token_ids, slots = np.arange(num_rows) + 5, np.arange(num_rows) + 900
    batch = pack_step(token_ids, slots, past, None)
    own = zip(token_ids.tolist(), slots.tolist(), strict=True)
    other = pack([Span([token], [slot], (0,)) for token, slot in own], past)
    names = ["input_ids", "position_ids", "new_slots", "output_rows", "output_columns"]
    for name in names:
        found, wanted = getattr(batch, name), getattr(other, name)
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)
    assert batch.new_columns is other.new_columns is None
    for name in ("num_new", "num_past"):
        assert getattr(batch, name).tolist() == getattr(other, name).tolist()
    assert (batch.num_rows, batch.num_new_tokens) == (num_rows, num_rows)


@given(rows_in_trees())
def test_paths_of_slots_are_those_of_a_tree(rows):
    tree, nodes, _ = rows
    width = max(tree.depth)
    slots = [[tree.slot[node] for node in tree.path(end)] for end in nodes]
    expected, past = tree.paths(nodes), paths_of(slots)
    assert past.num_tokens.tolist() == expected.num_tokens.tolist()
    assert past.columns(width).tolist() == expected.columns(width).tolist()
    distinct = {node for end in nodes for node in tree.path(end)}
    assert len(past.parent) == len(distinct) + 1  # what rows share is there once
