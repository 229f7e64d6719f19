"""An adapter of any kind is refused, or has the rows of PEFT's own model over a fresh copy."""

import asyncio
import copy
import random

import pytest
import torch

from genlm_backend import AsyncTransformer
from genlm_backend.errors import AdapterError, UnknownAdapterError
from tests.llm.conftest import word_tokenizer
from tests.llm.families import VOCAB
from tests.llm.hf import adapter_kinds as kinds
from tests.naive import naive_row

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {"rtol": 0, "atol": 5e-5}


class World:
    """A base model, adapters on disk, and what PEFT makes of each."""

    def __init__(self, base_name, folder):
        self.base = kinds.make_base(base_name)
        self.folder = folder
        self._fresh = {None: self.base}
        has_biases = any(name.endswith("bias") for name, _ in self.base.named_parameters())
        self.refused = {
            kind: why
            for kind, why in kinds.REFUSED.items()
            if has_biases or not kind.startswith("bias")
        }

    def path(self, kind, seed=0):
        path = self.folder / f"{kind}-{seed}"
        if not path.exists():
            kinds.save(kind, self.base, path, seed)
        return str(path)

    def row(self, adapter, token_ids):
        if adapter not in self._fresh:
            self._fresh[adapter] = kinds.fresh(self.base, self.path(*adapter))
        return naive_row(self._fresh[adapter], token_ids)

    def lm(self, **options):
        return AsyncTransformer(copy.deepcopy(self.base), word_tokenizer(), **options)


_worlds = {}


@pytest.fixture
def world(request, tmp_path_factory):
    name = request.param
    if name not in _worlds:
        _worlds[name] = World(name, tmp_path_factory.mktemp(name))
    return _worlds[name]


def contents(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_contents(model, before):
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not getattr(model, "peft_config", None)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in (*kinds.FREQUENT, *kinds.REFUSED)
        else pytest.param(kind, marks=pytest.mark.slow)
        for kind in kinds.KINDS
    ],
)
@pytest.mark.parametrize(
    "world",
    ["qwen2", pytest.param("tied", marks=pytest.mark.slow)],
    indirect=True,
)
def test_adapter_of_any_kind_is_refused_or_matches_peft(world, kind):
    path = world.path(kind)
    with world.lm() as lm:
        before = contents(lm.model)
        grads = [p.requires_grad for p in lm.model.parameters()]
        if kind in world.refused:
            with pytest.raises(AdapterError, match=world.refused[kind]):
                lm.add_new_lora(path, "mine")
            with pytest.raises(UnknownAdapterError):
                lm.next_token_logprobs_sync([1], "mine")
        else:
            lm.add_new_lora(path, "mine")
            differences = []
            for context in ([5, 6, 7], [5, 6, 7, 9, 3], [80]):
                row = lm.next_token_logprobs_sync(context, "mine")
                torch.testing.assert_close(row, world.row((kind, 0), context), **TOLERANCE)
                differences.append((row - world.row(None, context)).abs().max())
            assert max(differences) > 0.01
        for context in ([5, 6, 7], [5, 6, 7, 9]):
            row = lm.next_token_logprobs_sync(context)
            torch.testing.assert_close(row, world.row(None, context), **TOLERANCE)
        assert_same_contents(lm.model, before)
        assert grads == [p.requires_grad for p in lm.model.parameters()]


async def play(world, seed, num_steps):
    """A random history of adapters and queries, each answer compared with a fresh model's."""
    choose = random.Random(seed)
    usable = [kind for kind in kinds.KINDS if kind not in world.refused]
    chosen = choose.sample(usable, 5)
    loaded = {}
    contexts = [[choose.randrange(VOCAB) for _ in range(choose.randint(1, 6))] for _ in range(4)]
    with world.lm(row_cache_bytes=choose.choice([0, 1 << 20])) as lm:
        before = contents(lm.model)
        for _ in range(num_steps):
            step = choose.choice(["add", "remove", "refuse", "ask", "ask", "ask"])
            name = choose.choice("ab.")
            if step == "add":
                adapter = (choose.choice(chosen), choose.randrange(2))
                if name in loaded and choose.random() < 0.5:
                    lm.remove_lora(name)
                lm.add_new_lora(world.path(*adapter), name)
                loaded[name] = adapter
            elif step == "remove" and name in loaded:
                lm.remove_lora(name)
                del loaded[name]
            elif step == "refuse":
                with pytest.raises(AdapterError):
                    lm.add_new_lora(world.path(choose.choice(list(world.refused))), "c")
            elif step == "ask":
                readers = [None, *loaded]
                asked = [
                    (choose.choice(contexts), choose.choice(readers))
                    for _ in range(choose.randint(1, 5))
                ]
                if choose.random() < 0.5:
                    choose.choice(contexts).append(choose.randrange(VOCAB))
                rows = await asyncio.gather(*(lm.next_token_logprobs(*pair) for pair in asked))
                for (context, reader), row in zip(asked, rows, strict=True):
                    expected = world.row(loaded.get(reader), context)
                    torch.testing.assert_close(row, expected, **TOLERANCE)
        assert_same_contents(lm.model, before)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", ["qwen2"], indirect=True)
async def test_random_adapter_histories_match_fresh_peft_models(world, seed):
    await play(world, seed, num_steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.parametrize("world", ["qwen2", "tied", "llama"], indirect=True)
async def test_long_adapter_histories_match_fresh_peft_models(world, seed):
    await play(world, seed, num_steps=80)
