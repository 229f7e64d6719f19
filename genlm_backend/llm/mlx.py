"""AsyncMlxLM under an older name of its module."""

from genlm_backend.backends.mlx.async_mlx_lm import AsyncMlxLM as AsyncMlxLM
