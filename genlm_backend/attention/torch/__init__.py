"""Attention of a torch forward pass: operators, transformers caches, and picture prefills."""
