"""Models evaluated by MLX: on Apple silicon, and on the CPU of other machines."""
