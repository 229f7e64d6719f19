"""Attention of torch forward passes: operators, transformers caches, contexts with pictures."""
