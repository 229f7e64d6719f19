"""What evaluates models: transformers, vLLM, MLX, and one that needs no model."""
