"""Models of backends that this library does not have, which raise an error when they are used."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NoReturn, final

from genlm_backend.errors import MissingExtraError


class _Absent(abc.ABC):
    library: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    @classmethod
    def from_name(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an ``ImportError``: the backend is not available."""
        cls._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise MissingExtraError(
            f"{cls.__name__} is not available: this release has no {cls.library} "
            "backend. AsyncTransformer (backend 'hf') runs the same programs."
        )


@final
class AsyncSGLTransformer(_Absent):
    """A model evaluated by SGLang. Not available; using it raises an ``ImportError``."""

    library = "SGLang"
