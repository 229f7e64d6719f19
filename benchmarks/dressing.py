"""What it costs, before each batch, to see to it that a model computes as it is to."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.workload import Numbers

NUM_LAYERS = (1, 30)
NUM_BATCHES = 200
VOCAB = 1000


def dressing(repeats: int) -> Numbers:
    """Milliseconds of a batch of one row, the model itself left out, by number of layers."""
    from genlm_backend.backends.hf import packed_weights

    packed_weights.MIN_BYTES = 0
    packed_weights._time_ratio = lambda *_: 0.5  # whatever this processor finds
    return {f"{size}_ms": [_batch_ms(size) for _ in range(repeats)] for size in NUM_LAYERS}


def _batch_ms(num_layers: int) -> float:
    """Return the median of a batch through a model whose linear layers are all packed."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutput

    from genlm_backend import AsyncTransformer

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
    )
    model: Any = LlamaForCausalLM(config)

    def forward(input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
        logits: Any = torch.zeros(*input_ids.shape, VOCAB, dtype=torch.float32)
        return CausalLMOutput(logits=logits)

    model.forward = forward  # and none of its layers
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    options: dict[str, Any] = {"kv_cache_bytes": 0, "row_cache_bytes": 0, "num_threads": 1}
    with AsyncTransformer(model, tokenizer, packs_weights=True, **options) as lm:
        query = lm._query([1, 2, 3], None)

        def seconds() -> list[float]:
            found = []
            for _ in range(NUM_BATCHES):
                start = time.perf_counter()
                lm._hf.evaluate([query])
                found.append(time.perf_counter() - start)
            return found

        assert lm.packed_weight_bytes
        return 1000 * sorted(lm._batcher.call(seconds))[NUM_BATCHES // 2]
