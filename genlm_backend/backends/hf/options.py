"""Options of an evaluator and of ``from_pretrained``, checked before anything is loaded."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypedDict

import torch

from genlm_backend.checks import (
    Option,
    byte_count,
    check_names,
    checked,
    checks_of,
    device,
    integer,
    mapping,
    near_names,
    one_of,
    optional,
    shown,
    switch,
    thread_count,
)
from genlm_backend.errors import MissingExtraError, OptionError, OptionTypeError
from genlm_backend.prefix.budgets import check_budgets
from genlm_backend.prefix.codecs import KV_CACHE_DTYPES, KVCacheDtype


class HFOptions(TypedDict, total=False):
    """Options of ``HFEvaluator``, which ``AsyncTransformer`` documents."""

    kv_cache_bytes: Annotated[int | None, Option(None, optional(byte_count))]
    kv_cache_dtype: Annotated[KVCacheDtype | None, Option(None, one_of(None, *KV_CACHE_DTYPES))]
    host_cache_bytes: Annotated[int, Option(0, byte_count)]
    state_cache_bytes: Annotated[int | None, Option(None, optional(byte_count))]
    max_length: Annotated[int | None, Option(None, optional(integer(1)))]
    num_threads: Annotated[int | None, Option(None, optional(thread_count))]
    packs_weights: Annotated[bool | None, Option(None, optional(switch))]


def hf_options(values: Mapping[str, Any]) -> HFOptions:
    """Return the options of ``HFEvaluator`` among ``values``, checked; ignore other names."""
    checks = checks_of(HFOptions)
    options: Any = checked(checks, {name: values[name] for name in checks if name in values})
    check_budgets(
        options.get("kv_cache_bytes"),
        options.get("host_cache_bytes", 0),
        options.get("state_cache_bytes"),
    )
    return options


_FREQUENT = (
    *("attn_implementation", "device_map", "dtype", "local_files_only", "quantization_config"),
    *("revision", "token", "trust_remote_code"),
)
"""Common options of ``from_pretrained``, which errors suggest for misspelt names."""

_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Common dtypes of weights, which errors suggest for misspelt ones."""

_PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Strings that ``device_map`` takes instead of a device."""


def loading_options(
    bitsandbytes_opts: dict[str, Any] | None, hf_opts: dict[str, Any] | None
) -> dict[str, Any]:
    """Return keyword arguments for ``from_pretrained``; see ``AsyncTransformer.from_name``."""
    given = optional(mapping)("hf_opts", hf_opts)
    quantization = optional(mapping)("bitsandbytes_opts", bitsandbytes_opts)
    options: dict[str, Any] = {"device_map": "auto", "dtype": "auto", **(given or {})}
    for name in ("dtype", "torch_dtype"):
        _check_dtype(name, options.get(name))
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    place = options["device_map"]
    if isinstance(place, (str, torch.device)) and place not in _PLACEMENTS:
        device("device_map", place)
    if quantization:
        options["quantization_config"] = _quantization_config(quantization)
    return options


@contextlib.contextmanager
def explained_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Turn a model's ``TypeError`` for an unknown option into an ``OptionTypeError``."""
    try:
        yield
    except TypeError as error:
        # ``from_pretrained`` passes to the model all options that neither it nor the config knows.
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None or found[1] not in options:
            raise
        near = (
            near_names(found[1], _FREQUENT)
            or "; options of bitsandbytes belong in bitsandbytes_opts"
        )
        raise OptionTypeError(
            f"{found[1]} is not an option of hf_opts: neither from_pretrained nor the model's "
            f"config accepts it{near}"
        ) from error


def _check_dtype(name: str, value: Any) -> None:
    """Refuse all but "auto", ``None``, floating dtypes, their names, and mappings to these."""
    if isinstance(value, Mapping):
        for part, dtype in value.items():
            _check_dtype(f"{name}[{part!r}]", dtype)
        return
    if value is None or value == "auto":
        return
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        near = near_names(value, _DTYPES, quoted=True)
        kind = OptionError if isinstance(value, (str, torch.dtype)) else OptionTypeError
        raise kind(
            f"{name} must be 'auto' or a floating-point dtype such as "
            f"{', '.join(map(repr, _DTYPES[:3]))}, got {shown(value)}{near}"
        )


def _quantization_config(options: Any) -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            "bitsandbytes_opts needs bitsandbytes: pip install 'genlm-backend[bitsandbytes]'"
        )
    from transformers import BitsAndBytesConfig

    known = [*inspect.signature(BitsAndBytesConfig).parameters][:-1]  # the last is ``**kwargs``
    check_names(options, known, "option of BitsAndBytesConfig")
    return BitsAndBytesConfig(**options)
