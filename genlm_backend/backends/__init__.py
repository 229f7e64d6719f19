"""Backends: transformers, vLLM, MLX and llama.cpp, and a mock that needs no model."""
