"""Adapters in PEFT's format: reads them, puts their layers into a ``ModelView``, and tries it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from genlm_backend.backends.hf.forward_names import given_cache, returned_cache
from genlm_backend.backends.hf.model_view import ModelView
from genlm_backend.backends.hf.trial import rounding
from genlm_backend.backends.loading import check_reachable
from genlm_backend.errors import AdapterError, MissingExtraError

_REFUSED = {
    "layer_replication": "it would add layers to the model",
    "alora_invocation_tokens": "the tokens decide from which position on the adapter applies",
}
"""Options of adapters that do more than replace layers, each with the reason to refuse it."""

_PLAIN_INITIALISATIONS = ("gaussian", "orthogonal", "eva")
"""Strings for ``init_lora_weights`` that leave the model's own weights as they are."""


_Saved = tuple[Any, dict[str, torch.Tensor]]
"""The configuration of an adapter, and its weights."""


def put_adapter(path: str, view: ModelView, bare: ModelView, is_cached: bool) -> None:
    """Put an adapter from a directory or the hub into a view; ``bare`` is a view without it."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("LoRA adapters need PEFT: pip install 'genlm-backend[lora]'")
    try:
        check_reachable(path)
        saved = _read(path)
        for one in (view, bare):
            _take_out(one)
        _put_layers(saved, view, bare, is_cached)
    except Exception as error:  # PEFT and its file readers raise errors of many types
        is_said = isinstance(error, (ValueError, OSError))  # other errors need the type's name
        reason = str(error) if is_said else f"{type(error).__name__}: {error}"
        raise AdapterError(f"the adapter {path!r} cannot be loaded: {reason}") from error


def _read(path: str) -> _Saved:
    from peft import PeftConfig
    from peft.utils.save_and_load import load_peft_weights

    config = PeftConfig.from_pretrained(path)
    config.inference_mode = True
    config.base_model_name_or_path = None  # or PEFT warns if the model's name differs
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(
            f"an adapter of kind {_kind(config)} changes the context instead of the layers"
        )
    for option, why in _REFUSED.items():
        if getattr(config, option, None):
            raise ValueError(f"its {option} is not supported: {why}")
    init = getattr(config, "init_lora_weights", None)
    if isinstance(init, str) and init not in _PLAIN_INITIALISATIONS:
        raise ValueError(
            f"init_lora_weights={init!r} changes the model's own weights, which all other queries "
            "use: convert the adapter to a plain LoRA (path_initial_model_for_weight_conversion)"
        )
    # Cloned, since mapped weights change when another adapter is copied over the file.
    return config, {name: w.clone() for name, w in load_peft_weights(path, device="cpu").items()}


def _put_layers(saved: _Saved, view: ModelView, bare: ModelView, is_cached: bool) -> None:
    """Put an adapter's layers into a view, and check the rows of both views."""
    plain = base_of(bare.module)
    before, noise = _row(plain), _inconsistency(plain, is_cached)
    expected = _injected(saved, view)
    model = base_of(view.module)
    row, difference = _row(model), _inconsistency(model, is_cached)
    if not _are_alike(row, expected):
        kind = _kind(saved[0])
        raise ValueError(f"an adapter of kind {kind} does more than replace layers")
    if row.isnan().any() and not before.isnan().any():
        raise ValueError("its rows are NaN")
    if difference > rounding(before.dtype) + 2 * noise:
        raise ValueError(
            "its rows depend on how a context is computed, not only on the tokens: they differ by "
            f"{difference:.2g}"
        )
    if not _are_alike(_row(plain), before):
        raise ValueError(
            "loading it changed the rows that the model gives without any adapter; load the model "
            "again"
        )


def _take_out(view: ModelView) -> None:
    """Replace PEFT's layers in a view by the model's own."""
    if not view.copies:
        raise ValueError("this model does not run on copies of its modules, which an adapter needs")
    for module in [*view.module.modules()]:
        for name, child in module._modules.items():
            module._modules[name] = own_layer(child)


def _injected(saved: _Saved, view: ModelView) -> torch.Tensor:
    """Let PEFT put its layers into a view; return the row that PEFT's wrapper computes."""
    from peft import get_peft_model, set_peft_model_state_dict

    config, weights = saved
    model = base_of(view.module)
    vars(model).pop("peft_config", None)
    # PEFT may overwrite a weight of the model if the adapter's file has one of the same name.
    names = {_own_name(key) for key in weights}
    named = dict(model.named_parameters(remove_duplicate=False))
    kept = _kept_apart(view, {parameter for name, parameter in named.items() if name in names})
    wrapper = get_peft_model(model, config)
    result = set_peft_model_state_dict(wrapper, weights)
    _check_loaded(wrapper, result.missing_keys, result.unexpected_keys)
    expected = _row(wrapper.eval())
    for module, name, shared, own in kept:
        is_there = module._parameters.get(name) is own
        if not is_there or not (own.data_ptr() == shared.data_ptr() or torch.equal(own, shared)):
            changed = next((n for n, p in named.items() if p is shared), name)
            raise ValueError(
                f"it changes the model's own weights ({changed}), which all other queries use"
            )
    view.restore()
    return expected


def _kept_apart(
    view: ModelView, written: Collection[nn.Parameter]
) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
    """Give a view own parameters and hooks until ``restore``; return shared and own parameters."""
    own: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    kept: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    for module in view.copies.values():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            vars(module)[name] = vars(module)[name].copy()
        for name, shared in module._parameters.items():
            if type(shared) is nn.Parameter:  # not a subclass for quantised weights
                if shared not in own:
                    data = shared.detach().clone() if shared in written else shared.detach()
                    own[shared] = nn.Parameter(data, requires_grad=False)
                module._parameters[name] = own[shared]
                kept.append((module, name, shared, own[shared]))
    return kept


def _kind(config: Any) -> str:
    return getattr(config.peft_type, "value", config.peft_type)


def _check_loaded(wrapper: Any, missing: list[str], unexpected: list[str]) -> None:
    """Raise a ``ValueError`` if the adapter's file lacks weights or has some that fit nowhere."""
    parameters = dict(wrapper.named_parameters(remove_duplicate=False))
    # A parameter that layers share has several names, and the file has one of them.
    loaded = {id(parameter) for key, parameter in parameters.items() if key not in missing}
    lacking = [
        key
        for key in missing
        if key in parameters
        and id(parameters[key]) not in loaded
        and wrapper.base_model.prefix in key
        and f".{wrapper.active_adapter}" in key
    ]
    for keys, what in (
        (lacking, "lacks the weights"),
        (unexpected, "has weights that match no layer:"),
    ):
        if keys:
            shown = ", ".join(sorted(keys)[:4]) + (", …" if len(keys) > 4 else "")
            raise ValueError(f"its file {what} {shown}")


def _own_name(key: str) -> str:
    """Return the name of the model's weight that a key in an adapter's file may refer to."""
    key = key.removeprefix("base_model.model.")
    return key.replace(".base_layer.", ".").replace(".original_module.", ".")


@torch.inference_mode()
def _outputs(model: Any, start: int, stop: int, **options: Any) -> Any:
    weight = model.get_input_embeddings().weight
    token_ids = [i % len(weight) for i in range(start, stop)]
    ids = torch.tensor([token_ids], dtype=torch.int64, device=weight.device)
    return model(input_ids=ids, **options)


def _row(model: Any) -> torch.Tensor:
    """Return the logits after three tokens, from one pass."""
    return _outputs(model, 1, 4).logits[0, -1]


def _inconsistency(model: Any, is_cached: bool) -> float:
    """Return how far rows differ if later tokens are in the pass, or if a cache is used."""
    begun = _outputs(model, 1, 4, use_cache=True) if is_cached else None
    # Runs before the cache is used again, as passes of other contexts may in practice.
    longer = _outputs(model, 1, 6).logits[0]
    differences = [_difference(_row(model), longer[2])]
    if begun is not None:
        kept = {"use_cache": True, **given_cache(model, returned_cache(begun))}
        at_once = _outputs(model, 4, 6, **kept).logits[0, -1]
        kept |= given_cache(model, returned_cache(_outputs(model, 1, 4, use_cache=True)))
        _outputs(model, 4, 5, **kept)
        one_by_one = _outputs(model, 5, 6, **kept).logits[0, -1]
        # Some models with recurrent states continue a cache only by one token, others only by more.
        differences.append(min(_difference(row, longer[-1]) for row in (at_once, one_by_one)))
    return max(differences)


def _difference(row: torch.Tensor, other: torch.Tensor) -> float:
    return float((row - other).float().abs().max())


def _are_alike(row: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two rows of logits differ by rounding at most."""
    return torch.allclose(row, other, rtol=0, atol=rounding(row.dtype), equal_nan=True)


# -------------------------------------------------------------------- PEFT in the owner's model


def base_of(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, or ``model`` itself if it is not wrapped."""
    if not hasattr(model, "get_base_model"):
        return model
    try:
        return model.get_base_model()
    except KeyError:  # its active adapter has been deleted
        return model.base_model.model


def own_layer(layer: Any) -> Any:
    """Return the model's own layer inside PEFT's, or ``layer`` itself if it is not PEFT's."""
    while _is_of_peft(layer):
        layer = layer.base_layer if hasattr(layer, "base_layer") else layer.original_module
    return layer


def own_modules(model: Any) -> dict[Any, str]:
    """Return the modules of a model and their names, without the modules that PEFT added."""
    names: dict[Any, str] = {}
    waiting = [(model, "")]
    while waiting:
        module, name = waiting.pop()
        module = own_layer(module)
        if module is not None and module not in names:
            names[module] = name
            waiting += [(c, f"{name}.{n}".lstrip(".")) for n, c in module._modules.items()]
    return names


def adapters_of(model: Any) -> dict[str, Any]:
    """Return the configurations of the adapters that a model's owner loaded, by adapter name."""
    return vars(base_of(model)).get("peft_config") or {}


def layers_of_peft(model: Any) -> list[Any]:
    """Return the layers that PEFT has put around layers of a model."""
    return [module for module in model.modules() if _is_of_peft(module)]


def _is_of_peft(layer: Any) -> bool:
    if "peft.tuners.tuners_utils" not in sys.modules:  # PEFT is not loaded
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper))
