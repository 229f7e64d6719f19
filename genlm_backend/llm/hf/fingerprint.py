"""Fingerprint: what keys and values depend on besides the tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Self, final

import torch

from genlm_backend.cache import KVLayout

VOLATILE: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of a model's config that do not change what it computes, or that the layout tells."""

_WIDTHS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of a model, one for each thing that can differ.

    Attributes:
        config: Digest of what the model's config says.
        weights: Digest of the weights as the model came.
        adapter: Digest of the weights while an adapter is in place; ``weights`` without one.
        layout: The shapes of keys and values, and the format that they are kept in.
    """

    config: str
    weights: str
    adapter: str
    layout: str

    def fields(self) -> dict[str, str]:
        """Return all digests by name."""
        return asdict(self)

    @classmethod
    def of(cls, model: Any, weights: str, adapter: str, layout: KVLayout) -> Self:
        """Return the fingerprint of a model.

        Args:
            model: The model.
            weights: ``weights_digest`` of it as it came.
            adapter: The same while the adapter is in place.
            layout: The shapes of its keys and values.
        """
        said = model.config.to_diff_dict()
        config = {name: value for name, value in said.items() if name not in VOLATILE}
        text = json.dumps(config, sort_keys=True, default=str)
        layers = [
            f"{layer.num_key_heads}x{layer.key_dim}+{layer.num_value_heads}x{layer.value_dim} "
            f"{layer.dtype} as {layer.kept}"
            for layer in layout.layers
        ]
        config_digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(config_digest, weights, adapter, "; ".join(layers))


def weights_digest(model: Any) -> str:
    """Return a digest of a model's weights in the state that they are in.

    The bits of each weight are added up as integers, along each of two dimensions, and what comes
    is hashed. That is exact, so that it depends neither on the device nor on the number of
    threads, and takes about the time of reading the weights once. It tells models apart; it is no
    protection against somebody who makes two on purpose that have equal sums.
    """
    digest = hashlib.sha256()
    for tensor in _weights(model):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        if tensor.is_meta or not tensor.numel():  # which is elsewhere while nothing is computed
            continue
        bits = tensor.detach().contiguous().view(_WIDTHS[tensor.element_size()])
        table = bits.reshape(-1, bits.shape[-1] if bits.dim() else 1)
        for dim in (0, 1):
            digest.update(table.sum(dim, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def weights_state(model: Any) -> tuple[tuple[int, int], ...]:
    """Return where a model's weights are, and how often torch has seen each be changed."""
    return tuple((tensor.data_ptr(), tensor._version) for tensor in _weights(model))


def _weights(model: Any) -> Iterator[torch.Tensor]:
    for value in model.state_dict(keep_vars=True).values():
        if isinstance(value, torch.Tensor):
            yield value
