"""Prefix files: keys, values and state of one prefix, and a fingerprint of the model."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.lora import layers_of_peft
from genlm_backend.backends.hf.model_state import VOLATILE
from genlm_backend.backends.hf.support import vocab_width
from genlm_backend.errors import CacheError, PrefixFileError
from genlm_backend.prefix.kv_pool import KVLayout
from genlm_backend.queries.query import Adapter, RowQuery
from genlm_backend.scheduling.scheduler import Scheduler

FORMAT: Final = "genlm_backend prefix 1"

_DIFFERENT: Final = {
    "config": "from another model: its config differs",
    "weights": "from another model: its weights differ",
    "adapter": "for another adapter: save and load it with the same one, or do both without one",
    "layout": "in another number format, or has keys, values or states of other shapes",
}
_MEAN_TOLERANCE: Final = 1e-3

_WIDTHS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fingerprint_of(model: Any, weights: str, adapter: str, layout: KVLayout) -> dict[str, str]:
    """Return a model's fingerprint: digests and the layout, under the keys of ``_DIFFERENT``."""
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
    digest = hashlib.sha256(text.encode()).hexdigest()
    own = {"weights": weights, "adapter": adapter, "layout": "; ".join(layers)}
    return {"config": digest, **own}


@final
@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The tokens of a prefix, and their keys, values and states in the pools' format."""

    token_ids: tuple[int, ...]
    codes: list[tuple[torch.Tensor, ...]]  # [len(token_ids), columns]
    states: list[torch.Tensor]  # [1, *shape]
    num_resumed: int


def save(path: Path, prefix: Prefix, fingerprint: Mapping[str, str], layout: KVLayout) -> None:
    """Write a prefix to a file in the format of safetensors; an error leaves no partial file."""
    tensors = {"token_ids": torch.tensor(prefix.token_ids, dtype=torch.int32)}
    for number, codes in enumerate(prefix.codes):
        for i, of_tokens in enumerate(codes):
            tensors[f"codes.{number}.{i}"] = of_tokens.contiguous()
    if prefix.states:
        tensors["num_resumed"] = torch.tensor([prefix.num_resumed], dtype=torch.int32)
    for number, state in enumerate(prefix.states):
        tensors[f"state.{number}"] = state.contiguous()
    for number, layer in enumerate(layout.layers):
        if layer.mean_key is not None:
            tensors[f"mean_key.{number}"] = layer.mean_key.cpu().contiguous()
    said = {"format": FORMAT, **fingerprint}
    said["digest"] = _digest(said, tensors)
    name = path.parent / f".{secrets.token_hex(8)}.tmp"
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        try:
            save_file(tensors, name, said)
        except SafetensorError as error:  # such as a full disk
            raise OSError(errno.EIO, f"could not be written: {error}", str(path)) from error
        os.chmod(name, mode)  # the usual mode; safetensors has replaced the file by one of mode 600
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def load(path: Path, fingerprint: Mapping[str, str], layout: KVLayout) -> Prefix:
    """Check a file, and return its prefix, whose tensors are mapped into memory."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would wait
        raise PrefixFileError(f"{path} is a device or a pipe, not a prefix file")
    with path.open("rb"):  # its errors say more than safetensors'
        pass
    try:
        with safe_open(path, "pt") as file:
            said = dict(file.metadata() or {})
            if said.get("format") != FORMAT:
                raise PrefixFileError(f"{path} is no prefix file that this version can read")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise PrefixFileError(f"{path} is truncated, or no prefix file: {error}") from error
    for name, expected in fingerprint.items():
        if said.get(name) != expected:
            kinds = f": {said.get(name)}; this model has {expected}" if name == "layout" else ""
            raise PrefixFileError(f"{path} is {_DIFFERENT[name]}{kinds}")
    if said.pop("digest", None) != _digest(said, tensors):
        raise PrefixFileError(f"{path} has been changed since it was written")
    token_ids = tensors.get("token_ids", torch.empty(0, dtype=torch.int64))
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if found != _kinds(layout, token_ids.numel()):
        raise PrefixFileError(f"{path} has tensors of other names, dtypes or shapes than it should")
    for number, layer in enumerate(layout.layers):
        mean = layer.mean_key
        if mean is not None and not torch.allclose(
            tensors[f"mean_key.{number}"], mean.cpu(), atol=_MEAN_TOLERANCE, rtol=_MEAN_TOLERANCE
        ):
            raise PrefixFileError(
                f"{path} is from another model: the mean of that model's keys differs"
            )
    if not all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point()):
        raise PrefixFileError(f"{path} has numbers that are infinite or NaN")
    codes = [
        tuple(tensors[f"codes.{number}.{i}"] for i in range(len(layer.codec().columns())))
        for number, layer in enumerate(layout.layers)
    ]
    states = [tensors[f"state.{number}"] for number in range(len(layout.states.tensors))]
    num_resumed = int(tensors["num_resumed"]) if states else token_ids.numel()
    if states and not 0 < num_resumed <= token_ids.numel():
        raise PrefixFileError(f"{path} has no recurrent state after any of its tokens")
    return Prefix(tuple(token_ids.tolist()), codes, states, num_resumed)


def _kinds(layout: KVLayout, num_tokens: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of every tensor in a file of ``num_tokens`` tokens."""
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "token_ids": (torch.int32, (num_tokens,))
    }
    for number, layer in enumerate(layout.layers):
        for i, (width, dtype) in enumerate(layer.codec().columns()):
            kinds[f"codes.{number}.{i}"] = (dtype, (num_tokens, width))
        if layer.mean_key is not None:
            kinds[f"mean_key.{number}"] = (layer.mean_key.dtype, tuple(layer.mean_key.shape))
    if layout.states:
        kinds["num_resumed"] = (torch.int32, (1,))
    for number, state in enumerate(layout.states.tensors):
        kinds[f"state.{number}"] = (state.dtype, (1, *state.shape))
    return kinds


def _digest(said: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor, without a copy if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@final
class PrefixFiles:
    """Saves and loads the prefix files of a model, and caches digests of its weights."""

    def __init__(self, scheduler: Scheduler, runner: HFRunner, *, has_bytes: bool) -> None:
        self._scheduler, self._runner, self._has_bytes = scheduler, runner, has_bytes
        # By adapter: ``weights_state`` and ``weights_digest`` of the model with that adapter.
        self._digests: dict[Adapter | None, tuple[object, str]] = {}

    def check_can_keep(self, num_tokens: int) -> None:
        """Raise ``CacheError`` unless contexts of ``num_tokens`` tokens can be cached."""
        if not self._scheduler.cache.keeps:
            why = "it runs contexts whole" if self._has_bytes else "kv_cache_bytes is 0"
            raise CacheError(f"the model keeps no keys and values to save or load: {why}")
        self._scheduler.check_cacheable(num_tokens)

    def save(self, node: int | None, query: RowQuery, path: Path) -> None:
        """Write a context's keys, values and last recurrent state, read from its tree node."""
        if node is None:
            raise CacheError(
                f"a prompt of {len(query.context)} tokens does not fit beside pinned ones into "
                f"the cache of {self._scheduler.tree.num_slots} tokens (kv_cache_bytes), or has "
                "keys and values that are not finite in the cache's number format"
            )
        cache, nodes = self._scheduler.cache, self._scheduler.tree.nodes
        resumed = cache.resumed(node)
        states = [state.cpu() for state in cache.state_pool.read(nodes.state[[resumed]])]
        num_resumed = int(nodes.depth[resumed])
        codes = cache.pool.take_rows(nodes.slot[nodes.path(node)])
        prefix = Prefix(tuple(query.context), codes, states, num_resumed)
        save(path, prefix, self._fingerprint(query.adapter), cache.pool.layout)

    def load(self, path: str, adapter: Adapter | None, max_length: int | None) -> Sequence[int]:
        """Put the keys, values and state of a file into the cache; return the file's token ids."""
        self.check_can_keep(0)
        cache = self._scheduler.cache
        prefix = load(Path(path), self._fingerprint(adapter), cache.pool.layout)
        ids, width = prefix.token_ids, vocab_width(self._scheduler.runner.model)
        if not ids or not 0 <= min(ids) <= max(ids) < width:
            raise PrefixFileError(
                f"{path} has no tokens, or token ids that the model does not have"
            )
        self.check_can_keep(len(ids))
        if max_length is not None and len(ids) > max_length:
            raise CacheError(
                f"the {len(ids)} tokens of {path} are more than max_length={max_length}"
            )
        if not cache.fill(ids, prefix.codes, prefix.states, prefix.num_resumed, adapter):
            of_states = (
                ", or their recurrent state does not fit into "
                f"state_cache_bytes={cache.budgets.states}"
                if cache.budgets.states
                else ""
            )
            raise CacheError(
                f"the {len(ids)} tokens of {path} do not fit beside pinned ones into the cache of "
                f"{cache.tree.num_slots} tokens (kv_cache_bytes){of_states}"
            )
        return ids

    def look_again(self) -> None:
        """Forget digests: weights may have changed without a change of torch's version counters."""
        self._digests.clear()

    def _fingerprint(self, adapter: Adapter | None) -> dict[str, str]:
        """Return the model's fingerprint; digest weights anew only if ``weights_state`` differs."""
        model = self._scheduler.runner.model

        def digest(wanted: Adapter | None) -> str:
            view = self._runner.view_with(wanted).module
            state, known = weights_state(view), self._digests.get(wanted)
            if known is None or known[0] != state:
                known = self._digests[wanted] = state, weights_digest(view)
            return known[1]

        return _fingerprint_of(
            model, digest(None), digest(adapter), self._scheduler.cache.pool.layout
        )


def weights_digest(model: Any) -> str:
    """Return a digest of a model's weights: the same on any device, unless some are offloaded."""
    digest = hashlib.sha256(json.dumps(_settings(model)).encode())
    for tensor in _weights(model):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        if tensor.is_meta or not tensor.numel():  # offloaded between passes, or empty
            continue
        # Integer sums along two dimensions are exact, so they do not depend on the order of
        # addition. But one can forge other weights that have the same sums.
        bits = tensor.detach().contiguous().view(_WIDTHS[tensor.element_size()])
        table = bits.reshape(-1, bits.shape[-1] if bits.dim() else 1)
        for dim in (0, 1):
            digest.update(table.sum(dim, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()


def weights_state(model: Any) -> object:
    """Return the addresses and version counters of weights, and active adapters' settings."""
    state = [(tensor.data_ptr(), tensor._version) for tensor in _weights(model)]
    return state, _settings(model)


def _weights(model: Any) -> Iterator[torch.Tensor]:
    """Yield the weights in a model's state dict, except those of inactive adapters."""
    idle: set[int] = set()
    for layer in layers_of_peft(model):
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
    """Return the settings of active adapters, such as their scaling, but not their weights."""
    found: list[tuple[str, list[Any]]] = []
    for layer in layers_of_peft(model):
        active = _active(layer)
        for name, values in sorted(vars(layer).items()):
            if isinstance(values, dict) and (own := [values[a] for a in active if a in values]):
                told = [v if isinstance(v, (int, float, str)) else type(v).__name__ for v in own]
                found.append((f"{type(layer).__name__}.{name}", told))
    return found


def _active(layer: Any) -> list[str]:
    """Return the names of the adapters that a layer computes with."""
    return [] if layer.disable_adapters else list(layer.active_adapters)
