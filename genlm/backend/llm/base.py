"""What every model offers, under its older import name."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.errors import QueryDroppedError as BatchAbandoned
    from genlm_backend.llm.adapters import UNKNOWN_ADAPTER
    from genlm_backend.llm.base import AsyncLM
    from genlm_backend.llm.mock import MockAsyncLM
    from genlm_backend.replaced import batch_abandoned, fail_futures
    from genlm_backend.tokenization.vocab import decode_vocab

__all__ = [
    "UNKNOWN_ADAPTER",
    "AsyncLM",
    "BatchAbandoned",
    "MockAsyncLM",
    "batch_abandoned",
    "decode_vocab",
    "fail_futures",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "AsyncLM": "genlm_backend.llm.base",
        "BatchAbandoned": "genlm_backend.errors:QueryDroppedError",
        "MockAsyncLM": "genlm_backend.llm.mock",
        "UNKNOWN_ADAPTER": "genlm_backend.llm.adapters",
        "batch_abandoned": "genlm_backend.replaced",
        "decode_vocab": "genlm_backend.tokenization.vocab",
        "fail_futures": "genlm_backend.replaced",
    },
)
