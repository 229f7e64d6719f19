"""Tests of models of mlx-lm, and the same weights in both libraries."""

import copy
import functools
import os
import tempfile

os.environ.setdefault("MLX_ENABLE_TF32", "0")


@functools.cache
def _converted(model):
    from genlm_backend.llm.mlx.loader import MlxLoader

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return MlxLoader(folder).model()


def converted(model):
    """Return a model of mlx-lm with the weights of one of transformers."""
    return copy.deepcopy(_converted(model))
