"""Attention of new tokens to cached ones, and plans for reading shared prefixes once."""
