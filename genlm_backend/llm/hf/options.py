"""Options of ``AutoModelForCausalLM.from_pretrained``, checked before anything is loaded."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch

from genlm_backend.checks import check_names, device, mapping, optional
from genlm_backend.errors import MissingExtraError

_PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")
"""What a ``device_map`` may say instead of a device."""


def loading_options(
    bitsandbytes_opts: dict[str, Any] | None, hf_opts: dict[str, Any] | None
) -> dict[str, Any]:
    """Return keyword arguments for ``from_pretrained``; see ``AsyncTransformer.from_name``.

    Raises:
        OptionTypeError: (``TypeError``) If one of the two is no mapping, or bitsandbytes has no
            such option.
        DeviceError: (``ValueError``) If the device is not there.
        MissingExtraError: (``ImportError``) Without bitsandbytes, where it is needed.
    """
    given = optional(mapping)("hf_opts", hf_opts)
    quantization = optional(mapping)("bitsandbytes_opts", bitsandbytes_opts)
    options: dict[str, Any] = {"device_map": "auto", "dtype": "auto", **(given or {})}
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    place = options["device_map"]
    if isinstance(place, (str, torch.device)) and place not in _PLACEMENTS:
        device("device_map", place)
    if quantization:
        options["quantization_config"] = _quantization_config(quantization)
    return options


def _quantization_config(options: Any) -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            "bitsandbytes_opts needs bitsandbytes: pip install 'genlm-backend[bitsandbytes]'"
        )
    from transformers import BitsAndBytesConfig

    known = [*inspect.signature(BitsAndBytesConfig).parameters][:-1]  # the last takes any name
    check_names(options, known, "option of BitsAndBytesConfig")
    return BitsAndBytesConfig(**options)
