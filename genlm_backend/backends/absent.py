"""A model of a backend that this library does not have, which raises an error when it is used."""

from __future__ import annotations

from typing import Any, NoReturn, final

from genlm_backend.errors import MissingExtraError


@final
class AsyncSGLTransformer:
    """A model evaluated by SGLang. Not available; using it raises an ``ImportError``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MissingExtraError(
            "AsyncSGLTransformer is not available: this release has no SGLang backend. "
            "AsyncTransformer (backend 'hf') runs the same programs."
        )

    @classmethod
    def from_name(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an ``ImportError``: the backend is not available."""
        cls()
        raise AssertionError
