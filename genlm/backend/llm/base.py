"""What every model offers, under its older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.backends.mock import MockAsyncLM
    from genlm_backend.compat.batching import batch_abandoned, fail_futures
    from genlm_backend.compat.draw import temper
    from genlm_backend.errors import QueryDroppedError as BatchAbandoned
    from genlm_backend.model.async_lm import AsyncLM
    from genlm_backend.queries.query import UNKNOWN_ADAPTER
    from genlm_backend.tokenization.vocab import decode_vocab

__all__ = [
    "UNKNOWN_ADAPTER",
    "AsyncLM",
    "BatchAbandoned",
    "MockAsyncLM",
    "batch_abandoned",
    "decode_vocab",
    "fail_futures",
    "temper",
]

__getattr__, __dir__ = lazy_names(globals())
