"""Fingerprint: digests of all that keys and values depend on besides the tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch

from genlm_backend.prefix.kv_pool import KVLayout

VOLATILE: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of a model's config that do not change its rows, or that the layout has too."""

_WIDTHS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of a model, one for each thing that can differ."""

    config: str
    weights: str
    adapter: str
    layout: str

    @classmethod
    def of(cls, model: Any, weights: str, adapter: str, layout: KVLayout) -> Self:
        said = model.config.to_diff_dict()
        config = {name: value for name, value in said.items() if name not in VOLATILE}
        text = json.dumps(config, sort_keys=True, default=str)
        kinds = [
            f"{layer.num_key_heads} x {layer.key_dim} and {layer.num_value_heads} x "
            f"{layer.value_dim} of {str(layer.dtype).removeprefix('torch.')}, kept as "
            f"{None if layer.codec().is_exact else layer.kept}"
            for layer in layout.layers
        ]
        layers = [f"{len(list(own))} layers of {kind}" for kind, own in itertools.groupby(kinds)]
        if layout.states:
            dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in layout.states.tensors}
            size = layout.states.bytes_per_state
            layers.append(f"a recurrent state of {size} bytes of {' and '.join(sorted(dtypes))}")
        config_digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(config_digest, weights, adapter, "; ".join(layers))


def weights_digest(model: Any) -> str:
    """Return a digest of a model's weights, the same on any device and number of threads."""
    digest = hashlib.sha256(json.dumps(_settings(model)).encode())
    for tensor in _weights(model):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        if tensor.is_meta or not tensor.numel():  # which is elsewhere while nothing is computed
            continue
        # The bits are added up as integers along two dimensions, which is exact and takes the time
        # of reading the weights once. It is no protection against models made on purpose to be
        # equal.
        bits = tensor.detach().contiguous().view(_WIDTHS[tensor.element_size()])
        table = bits.reshape(-1, bits.shape[-1] if bits.dim() else 1)
        for dim in (0, 1):
            digest.update(table.sum(dim, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def weights_state(model: Any) -> object:
    """Return where a model's weights are, how often each was changed, and adapters' settings."""
    state = [(tensor.data_ptr(), tensor._version) for tensor in _weights(model)]
    return state, _settings(model)


def _weights(model: Any) -> Iterator[torch.Tensor]:
    """Return the weights that a model computes with, those of idle adapters left out."""
    idle: set[int] = set()
    for layer in _adapted(model):
        for name in layer.adapter_layer_names:
            parts: Any = getattr(layer, name, None)
            for adapter in parts.keys() - _active(layer) if hasattr(parts, "keys") else ():
                part = parts[adapter]
                is_module = isinstance(part, torch.nn.Module)
                own = part.state_dict(keep_vars=True).values() if is_module else [part]
                idle.update(map(id, own))
    for value in model.state_dict(keep_vars=True).values():
        if isinstance(value, torch.Tensor) and id(value) not in idle:
            yield value


def _settings(model: Any) -> list[tuple[str, list[Any]]]:
    """Return the settings of adapters other than their weights, such as their scaling."""
    found: list[tuple[str, list[Any]]] = []
    for layer in _adapted(model):
        active = _active(layer)
        for name, values in sorted(vars(layer).items()):
            if isinstance(values, dict) and (own := [values[a] for a in active if a in values]):
                told = [v if isinstance(v, (int, float, str)) else type(v).__name__ for v in own]
                found.append((f"{type(layer).__name__}.{name}", told))
    return found


def _adapted(model: Any) -> Iterator[Any]:
    """Return the layers that adapters of PEFT have been put around."""
    for module in getattr(model, "modules", list)():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters"):
            yield module


def _active(layer: Any) -> list[str]:
    """Return the names of the adapters that a layer computes with."""
    return [] if layer.disable_adapters else list(layer.active_adapters)
