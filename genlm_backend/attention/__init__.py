"""Attention of a forward pass's new tokens, and plans that share the cached ones."""
