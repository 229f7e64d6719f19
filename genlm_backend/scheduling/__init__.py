"""Plans and runs forward passes over a prefix tree; imports neither transformers nor MLX."""
