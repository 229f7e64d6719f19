"""ForkConnector: lets a new request begin from the keys and values of a live session.

A session is a request that stays in vLLM after its next-token row has been computed. vLLM loads
the class as a KV connector, and asks how many tokens of each new request it can supply.
vLLM's own prefix caching shares full blocks. The connector adds the rest, usually one partial
block, to the block copies that vLLM's workers make before the step. It acts only in the scheduler.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any, final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from genlm_backend.errors import UnsupportedModelError

SOURCE, NUM_SHARED = "genlm_source", "genlm_num_shared"
"""Keys of ``kv_transfer_params``: the id of the source request, and how many tokens to share."""


@final
class ForkConnector(KVConnectorBase_V1):
    """A KV connector that plans block copies from live sessions to new requests."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        num_groups = len(kv_cache_config.kv_cache_groups)
        if num_groups != 1:
            raise UnsupportedModelError(
                f"this model has {num_groups} groups of KV-cache layers, instead of one: its "
                "contexts cannot be forked at every token"
            )
        self._block_size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._manager: Any = None
        self._requests: dict[str, Any] = {}
        self._copies: list[KVCacheBlockCopy] = []
        self._begun: set[str] = set()

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Keep vLLM's manager, which knows the blocks of each request."""
        self._manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        """Keep vLLM's request, which knows how many of its tokens have been computed."""
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens to copy after the computed ones, and ``False`` (not async)."""
        params = request.kv_transfer_params
        if not params:
            return 0, False
        num_shared, source = params[NUM_SHARED], self._requests.get(params[SOURCE])
        # A preempted source has too few computed tokens to copy from. A source that resumes in this
        # step may reuse blocks that another request computes only in this step, after the copies.
        if source is None or source.num_computed_tokens < num_shared:
            return 0, False
        if source.request_id in self._begun:
            return 0, False
        return max(num_shared - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan to copy the blocks with the last ``num_external_tokens`` of the shared tokens."""
        if not request.num_computed_tokens:
            self._begun.add(request.request_id)
        if not num_external_tokens:
            return
        params = request.kv_transfer_params
        num_shared = params[NUM_SHARED]
        first = (num_shared - num_external_tokens) // self._block_size
        end = -(-num_shared // self._block_size)
        sources = self._blocks(params[SOURCE])[first:end]
        targets = self._blocks(request.request_id)[first:end]
        for source, target in zip(sources, targets, strict=True):
            self._copies.append(KVCacheBlockCopy(source, target))

    def _blocks(self, request_id: str) -> list[int]:
        (blocks,) = self._manager.get_block_ids(request_id)
        return blocks

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Add the planned copies to the step, and all picture features to its new requests."""
        # vLLM omits features of pictures in its encoder cache. But a request needs them again after
        # ``clear_cache()``, which empties that cache and preempts all requests.
        for new in scheduler_output.scheduled_new_reqs:
            if new.mm_features:
                new.mm_features = self._requests[new.req_id].mm_features
        if self._copies:
            planned = scheduler_output.kv_cache_block_copies or []
            scheduler_output.kv_cache_block_copies = [*planned, *self._copies]
            self._copies = []
        self._begun.clear()
        return KVConnectorMetadata()

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; ``False`` lets vLLM free its blocks at once."""
        self._requests.pop(request.request_id, None)
        return False, None

    # ---------------------------------------------------------------- in a worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: the step's block copies bring the keys and values."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM's workers make the copies before any layer runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: keys and values stay in vLLM's blocks."""

    def wait_for_save(self) -> None:
        """Do nothing: ``save_kv_layer`` saves nothing."""
