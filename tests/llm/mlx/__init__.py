"""Tests of models of mlx-lm, and the same weights in both libraries."""

import copy
import functools
import os
import tempfile

os.environ.setdefault("MLX_ENABLE_TF32", "0")


@functools.cache
def _converted(model):
    from genlm_backend.backends.mlx.mlx_loader import MlxLoader

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return MlxLoader(folder, allow_untested=True).model()


def converted(model):
    """Return a model of mlx-lm with the weights of one of transformers."""
    return copy.deepcopy(_converted(model))


def sharpened(model):
    """Return a model of mlx-lm with random weights whose next token hangs on every token."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    key = mx.random.key(0)
    flat = dict(tree_flatten(model.parameters()))
    for name, value in flat.items():
        if value.ndim >= 2:
            key, own = mx.random.split(key)
            flat[name] = mx.random.normal(value.shape, key=own) * 1.5 / value.shape[-1] ** 0.5
    model.update(tree_unflatten(list(flat.items())))
    return model


def over(model, **options):
    """Return an ``AsyncMlxLM`` of the weights of a model of transformers."""
    from genlm_backend import AsyncMlxLM
    from tests.llm.conftest import word_tokenizer

    return AsyncMlxLM(converted(model), word_tokenizer(), row_cache_bytes=0, **options)
