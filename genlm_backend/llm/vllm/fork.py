"""ForkConnector: lets a new session begin from the keys and values of a live one.

vLLM loads it as a KV connector and asks it, for each new request, how many of its tokens need not
be computed. Full blocks are shared by vLLM's own prefix caching; what is left, as a rule one
partial block, is copied on the device before the forward pass.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

SOURCE, NUM_SHARED = "genlm_source", "genlm_num_shared"


@dataclass
class _Copies(KVConnectorMetadata):
    """Blocks to copy before a step: ``(from, to)``."""

    pairs: list[tuple[int, int]] = field(default_factory=list)


class ForkConnector(KVConnectorBase_V1):
    """Plans the copies in the scheduler, makes them in the workers."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size: int = vllm_config.cache_config.block_size
        self._manager: Any = None
        self._pairs: list[tuple[int, int]] = []
        self._kv_caches: dict[str, torch.Tensor] = {}

    # ---------------------------------------------------------------- in the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Remember who knows the blocks of each request."""
        self._manager = kv_cache_manager

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens beyond ``num_computed_tokens`` its source has."""
        params = request.kv_transfer_params or {}
        return max(0, params.get(NUM_SHARED, 0) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the copies of the blocks that hold these tokens."""
        if not num_external_tokens:
            return
        params = request.kv_transfer_params
        num_shared = params[NUM_SHARED]
        first = (num_shared - num_external_tokens) // self._block_size
        end = -(-num_shared // self._block_size)
        sources = self._manager.get_block_ids(params[SOURCE])
        targets = self._manager.get_block_ids(request.request_id)
        for source, target in zip(sources, targets, strict=True):
            self._pairs.extend(zip(source[first:end], target[first:end], strict=True))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Hand the planned copies to the workers."""
        pairs, self._pairs = self._pairs, []
        return _Copies(pairs)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return that nothing of a finished request is still needed."""
        return False, None

    # ---------------------------------------------------------------- in a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember the blocks of each layer; the first dimension is the block."""
        self._kv_caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy, before the forward pass of the step."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Copies)
        if not metadata.pairs:
            return
        device = next(iter(self._kv_caches.values())).device
        source, target = torch.tensor(metadata.pairs, device=device).unbind(1)
        for blocks in self._kv_caches.values():
            blocks[target] = blocks[source]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: the copies are ordered before the layers."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: what is live stays where it is."""

    def wait_for_save(self) -> None:
        """Do nothing."""
