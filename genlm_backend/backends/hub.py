"""The Hugging Face hub: whether it answers, and which of its models are in the local cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SECONDS = 5.0
"""Seconds to wait for the hub to answer; without a network the attempt fails at once."""


def hub_answers() -> bool:
    """Return whether the hub answers a request of its own client.

    It is not asked, and does not answer, where ``HF_HUB_OFFLINE`` is set.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    unanswered: Any = HfHubHTTPError.__bases__  # the client's own errors, whichever client it is
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except unanswered as error:
        logger.info("the hub does not answer: %s", error)
        return False
    return True


def cached_models() -> list[str]:
    """Return the repositories of models in the hub's local cache."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return sorted(f.name.removeprefix("models--").replace("--", "/") for f in folders)
