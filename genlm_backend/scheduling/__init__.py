"""Forward passes of many contexts over a prefix tree; no transformers and no MLX by name."""
