"""Backends: evaluators of models by transformers, vLLM and MLX, and one that needs no model."""
