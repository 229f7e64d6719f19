"""Python's garbage collector has nothing to do for a batch, and leaves imported modules alone."""

import gc
import os
import subprocess
import sys

import pytest
import torch

from tests.llm import families
from tests.llm.conftest import word_tokenizer

LOADING = """
import gc
{before}
from genlm_backend import load_model_by_name
with load_model_by_name("smollm2") as lm:
    print(gc.get_freeze_count(), gc.isenabled())
"""

WRAPPED = """
from genlm_backend import AsyncTransformer
from tests.llm import families
from tests.llm.conftest import word_tokenizer
lm = AsyncTransformer(families.make("llama"), word_tokenizer())
"""
"""A model in cycles, which collection has to free if the program drops it."""


@pytest.mark.real
@pytest.mark.parametrize(
    ("before", "refused", "is_frozen", "is_enabled"),
    [
        ("", "", True, True),
        ("", "0", False, True),
        ("gc.disable()", "", False, False),
        (WRAPPED, "", False, True),
    ],
)
def test_loading_by_name_freezes_gc_only_if_allowed(before, refused, is_frozen, is_enabled):
    found = subprocess.run(
        [sys.executable, "-c", LOADING.format(before=before)],
        env={**os.environ, "GENLM_BACKEND_FREEZE": refused},
        capture_output=True,
        text=True,
        check=True,
    )
    count, enabled = found.stdout.split()
    assert (int(count) > 100_000, enabled) == (is_frozen, str(is_enabled))


def test_batch_leaves_nothing_for_the_garbage_collector():
    from genlm_backend import AsyncTransformer

    model = families.make("llama")
    with AsyncTransformer(model, word_tokenizer(), row_cache_bytes=0, batch_size=50) as lm:
        asked = [[5, 6, 7, n] for n in range(23)] + [[9, n] for n in range(23)]
        lm.batch_next_token_logprobs_sync(asked)
        lm.batch_next_token_logprobs_sync([[*context, 2] for context in asked])
        gc.collect()  # of what is compiled for the first step, too
        rows = lm.batch_next_token_logprobs_sync([[*context, 1] for context in asked])
        assert gc.collect() == 0
    assert rows.isfinite().any()
    assert isinstance(rows, torch.Tensor)
