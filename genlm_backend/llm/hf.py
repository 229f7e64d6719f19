"""AsyncTransformer under an older name of its module."""

from genlm_backend.backends.hf.async_transformer import AsyncTransformer as AsyncTransformer
