"""Forward passes of many contexts over a prefix tree; neither transformers nor MLX."""
