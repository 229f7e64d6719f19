"""What a step of a model with recurrent states costs, beside the model with its own cache."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.workload import Numbers
from genlm_backend.backends.hf.forward_names import given_cache

NUM_DRAWN = 16
"""Tokens that each particle draws, one after the other."""

BEHIND = (51, 512, 2048)
"""Tokens that all particles share."""

NUM_PARTICLES = 20
NUM_STEPS = 8
VOCAB = 4096

SMALL = "8 layers of 256"

SIZES: dict[str, dict[str, Any]] = {
    SMALL: {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "24 layers of 1,024": {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
"""Random Qwen3.5 models: three layers of a gated delta rule for each that attends."""


def steps(repeats: int, size: str) -> Numbers:
    """Milliseconds of a step by our library and by the model alone, behind so many tokens."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(vocab_size=VOCAB, **SIZES[size])).eval()
    numbers: dict[str, list[float]] = {}
    lm = _wrapped(model)
    for num_shared in BEHIND:
        ways: dict[str, Callable[[list[int]], list[float]]] = {
            "ours": lambda prompt: _ours(lm, prompt),
            "own": lambda prompt: _own(model, prompt),
        }
        for i in range(repeats):
            generator = random.Random(f"{num_shared} {i}")
            prompt = [generator.randrange(VOCAB) for _ in range(num_shared)]
            for name, way in ways.items():  # in turns, so that both meet the same machine
                numbers.setdefault(f"{num_shared} {name}_ms", []).extend(way(prompt))
    prompt = [random.Random(2).randrange(VOCAB) for _ in range(512)]
    for _ in range(repeats if size == SMALL else 0):
        numbers.setdefault("ours_sis_s", []).append(_seconds(lambda: _draw(lm, prompt)))
        numbers.setdefault("own_sis_s", []).append(_seconds(lambda: _generate(model, prompt)))
    lm.close()
    return numbers


def choosing(repeats: int) -> Numbers:
    """Milliseconds in which a step of particles is given states, by how many there are of them.

    What small states cost that there are many of: of room for them, and where all are taken.
    """
    import numpy as np

    from genlm_backend.prefix.prefix_tree import PrefixTree
    from genlm_backend.prefix.slot_allocator import SlotAllocator
    from genlm_backend.prefix.state_cache import StateCache

    numbers: dict[str, list[float]] = {}
    for num_states, is_full in ((1_000, False), (100_000, False), (100_000, True)):
        tree = PrefixTree(
            SlotAllocator(num_states + 10_000), states=partial(StateCache, num_states=num_states)
        )
        nodes = np.repeat(np.int32(tree.root(None)), NUM_PARTICLES)
        tokens = np.arange(NUM_PARTICLES, dtype=np.int32)
        num_before = num_states // NUM_PARTICLES if is_full else 0
        times: list[float] = []
        for _ in range(num_before + 40 * repeats):
            tree.new_step()
            tree.touch(nodes)
            slots = tree.allocate(NUM_PARTICLES, nodes)
            assert slots is not None
            new = tree.append(nodes, tokens, slots)
            began = time.perf_counter()
            tree.states.go_on_from(nodes)
            noted = time.perf_counter()
            nodes = tree.insert(new)
            linked = time.perf_counter()
            tree.states.give(nodes, np.zeros(NUM_PARTICLES, np.int64))
            times.append(1e3 * (time.perf_counter() - linked + noted - began))
        numbers[f"{num_states:,} {'taken' if is_full else 'free'}_ms"] = times[num_before:]
    return numbers


def ratio(numbers: Numbers, num_shared: int) -> float:
    """Return the step of ours over the model's own, of medians."""
    ours, own = (statistics.median(numbers[f"{num_shared} {name}_ms"]) for name in ("ours", "own"))
    return ours / own


def _wrapped(model: Any) -> Any:
    from tokenizers import Tokenizer, models

    from genlm_backend import AsyncTransformer

    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    return AsyncTransformer(model, tokenizer, row_cache_bytes=0, kv_cache_bytes=4 << 30)


def _ours(lm: Any, prompt: list[int]) -> list[float]:
    generator = random.Random(1)
    lm.clear_cache()
    lm.next_token_logprobs_sync(prompt)
    contexts = [lm.context(prompt)] * NUM_PARTICLES
    found = []
    for _ in range(NUM_STEPS):
        contexts = [context.extend(generator.randrange(VOCAB)) for context in contexts]
        start = time.perf_counter()
        lm.batch_next_token_logprobs_sync(contexts)
        found.append(1000 * (time.perf_counter() - start))
    return found


@torch.inference_mode()
def _own(model: Any, prompt: list[int]) -> list[float]:
    from transformers import DynamicCache

    generator = random.Random(1)
    cache = DynamicCache(config=model.config)
    kept = given_cache(model, cache)
    model(torch.tensor([prompt]), **kept, logits_to_keep=1)
    rows: Any = torch.zeros(NUM_PARTICLES, dtype=torch.int64)  # of the prompt, for each
    cache.reorder_cache(rows)
    found = []
    for _ in range(NUM_STEPS):
        tokens = torch.tensor([[generator.randrange(VOCAB)] for _ in range(NUM_PARTICLES)])
        start = time.perf_counter()
        logits = model(tokens, **kept, logits_to_keep=1).logits[:, -1]
        logits.float().log_softmax(-1)
        found.append(1000 * (time.perf_counter() - start))
    return found


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _draw(lm: Any, prompt: list[int]) -> None:
    """Draw tokens of all particles behind a prompt that nothing is kept of."""
    lm.clear_cache()
    generator = torch.Generator().manual_seed(0)
    contexts = [lm.context(prompt)] * NUM_PARTICLES
    for _ in range(NUM_DRAWN):
        rows = lm.batch_next_token_logprobs_sync(contexts)
        drawn = [lm.draw(row, generator=generator) for row in rows]
        contexts = [c.extend(token) for c, token in zip(contexts, drawn, strict=True)]


def _generate(model: Any, prompt: list[int]) -> None:
    """Let transformers do the same, by its own cache."""
    ids = torch.tensor([prompt] * NUM_PARTICLES)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=NUM_DRAWN,
        min_new_tokens=NUM_DRAWN,
    )
