"""Engine: requests that come and go, with a queue of results for each."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.generation.engine.engine import Engine

__all__ = ["Engine"]

__getattr__, __dir__ = lazy_names(globals(), {"Engine": "genlm_backend.generation.engine.engine"})
