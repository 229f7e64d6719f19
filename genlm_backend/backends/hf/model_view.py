"""ModelView: a copy of a model's tree of modules that shares the model's parameters.

The copy has what passes need besides weights: configs that name this library's attention functions,
an output embedding that picks positions, packed layers, adapters. The originals stay unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PretrainedConfig

from genlm_backend.attention.forward_batch import ForwardBatch
from genlm_backend.backends.hf.attention_interface import name_attention
from genlm_backend.backends.hf.forward_names import cache_argument, parameters_of

logger = logging.getLogger(__name__)

_TRAINING: Final = ("training", "gradient_checkpointing")
"""Attributes of modules for training, which a view sets to ``False``."""

_HOOKS: Final = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
"""Names of the dictionaries that hold a module's forward hooks and their options."""

_CAPTURING: Final = "_output_capturing_hooks_installed"
"""Attribute that transformers sets on models with hooks that capture hidden states."""

_LONG: Final = 64
"""Fewest tokens of a long pass, which checks between layers whether it is cancelled."""

AS_WRITTEN: Final = "_torchdynamo_orig_callable"
"""Name of the attribute of a compiled function that holds the original function."""


@final
class ModelView:
    """Copies of a model's modules that share its parameters and buffers, or the model itself."""

    # The view has modules, configs, hooks and bound methods of its own, and shares all other
    # attributes with the model. A view of a compiled model runs the original code, since passes
    # differ in shape, and a compiler cannot trace this library's attention functions.
    def __init__(self, model: Any, *, names_ours: bool = False, is_apart: bool = True) -> None:
        self._model: Any = model
        self._names_ours = names_ours
        modules = [*model.modules()] if is_apart else []
        self.copies: dict[nn.Module, Any] = {m: object.__new__(type(m)) for m in modules}
        self.module: Any = self.copies.get(model, model)
        self._configs: dict[int, Any] = {}  # memo of ``copy.deepcopy``
        self._own_configs: list[Any] = []
        self.parameters = parameters_of(model)
        self.cache_argument = cache_argument(self.parameters)
        self._batch: ForwardBatch | None = None
        self._is_picked, self._can_pick = False, True
        self._picking: partial[Any] | None = None
        self._bare: dict[Any, tuple[type[Any], dict[str, Any]]] = {}
        for module, own in self.copies.items():
            filled = {name: self._rebound(value) for name, value in {**vars(module)}.items()}
            filled["_modules"] = {n: self._rebound(c) for n, c in module._modules.items()}
            filled |= {name: False for name in _TRAINING if name in filled}
            self._bare[own] = type(own), filled
        self.restore()

    def close(self) -> None:
        """Drop the references to the model; the view cannot run afterwards."""
        # Bound attributes refer back to their modules: these cycles would keep gigabytes of
        # parameters until Python collects garbage.
        for own in self.copies.values():
            vars(own).clear()
        self.copies, self._bare, self.module, self._model = {}, {}, None, None
        self._picking = None

    # ---------------------------------------------------------------- resetting modules

    def restore(self) -> None:
        """Reset the copies to their original class and attributes, but keep their children."""
        for own, (_, attributes) in self._bare.items():
            children = vars(own).get("_modules", attributes["_modules"])
            vars(own).clear()
            copies = {name: {**attributes[name]} for name in ("_parameters", "_buffers")}
            vars(own).update(attributes, _modules=children, **copies)
        self.undress()

    def undress(self) -> None:
        """Restore the copies' original class and ``forward``; copy the model's current hooks."""
        for module, own in self.copies.items():
            kind, attributes = self._bare[own]
            own.__class__ = kind
            for name in ("forward", _CAPTURING):
                vars(own).pop(name, None)
            if "forward" in attributes:
                vars(own)["forward"] = attributes["forward"]
            if _CAPTURING in vars(module):
                vars(own)[_CAPTURING] = vars(module)[_CAPTURING]
            for name in _HOOKS:
                hooks = [*vars(module)[name].items()]
                vars(own)[name] = OrderedDict((key, self._rebound(hook)) for key, hook in hooks)

    def _rebound(self, value: Any) -> Any:
        """Return ``value``, with modules and configs of the model replaced by the view's."""
        if isinstance(value, nn.Module):
            return self.copies.get(value, value)
        if isinstance(value, PretrainedConfig):
            return self._config(value)
        if hasattr(value, AS_WRITTEN):
            return self._rebound(getattr(value, AS_WRITTEN))
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._rebound(value.__self__))
        if isinstance(value, partial):  # such as the ``forward`` that accelerate sets
            options = {name: self._rebound(part) for name, part in value.keywords.items()}
            made = partial(self._rebound(value.func), *map(self._rebound, value.args), **options)
            vars(made).update(vars(value))  # such as ``__wrapped__``, which has the signature
            return made
        if type(value) in (list, tuple) and any(map(_is_bound, value)):
            return type(value)(map(self._rebound, value))
        if type(value) is dict and any(map(_is_bound, [*value.values()])):
            return {name: self._rebound(part) for name, part in [*value.items()]}
        return value

    def _config(self, config: Any) -> Any:
        own = copy.deepcopy(config, self._configs)
        name_attention(own, self._names_ours)
        self._own_configs.append(own)
        return own

    def name_attention(self, is_ours: bool) -> None:
        """Make the view's configs name this library's attention functions, or the model's own."""
        # Ours are named only if needed: some models choose their mask by the name in their config.
        self._names_ours = is_ours
        for config in self._own_configs:
            name_attention(config, is_ours)

    # ---------------------------------------------------------------- one pass

    def logits(self, batch: ForwardBatch, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Run the view; return logits at the outputs of a batch: ``[num_outputs, model_vocab]``."""
        # Few positions need logits, and projecting every position onto a wide vocabulary is slow.
        # So ``pick`` makes the output embedding project only the hidden states at the outputs.
        name = self.cache_argument or "cache"
        named = {name if n == "cache" else n: inputs[n] for n in inputs}
        self._batch, self._is_picked = batch, False
        try:
            logits = self.module(**named).logits
        finally:
            self._batch = None
        return logits[0] if self._is_picked else _at_outputs(logits, batch)

    def pick(self) -> None:
        """Make the output embedding project only hidden states at the outputs of a batch."""
        head = self.module.get_output_embeddings() if self.copies else None
        is_own = head not in self.copies and any(head is m for m in self.module.modules())
        if head is None or not is_own:
            return
        if self._picking is None or vars(head).get("forward") is not self._picking:
            self._picking = partial(self._projected, head.forward)
            vars(head)["forward"] = self._picking

    def check_between_layers(self, check_cancelled: Callable[[], object]) -> None:
        """Make long passes, except decode steps, call ``check_cancelled`` before each layer."""
        lists = [own for own in self.copies.values() if isinstance(own, nn.ModuleList)]
        # The list with the most modules holds the layers; lists of experts are inside it.
        for layer in max(lists, key=lambda own: len([*own.modules()]), default=()):
            forward: Any = layer.forward
            if getattr(forward, "func", None) != self._checked:
                vars(layer)["forward"] = partial(self._checked, forward, check_cancelled)

    def _checked(
        self, forward: Any, check_cancelled: Callable[[], object], *args: Any, **options: Any
    ) -> Any:
        batch = self._batch
        if batch is not None and not batch.is_decode and batch.num_new_tokens >= _LONG:
            check_cancelled()
        return forward(*args, **options)

    def _projected(self, forward: Any, *args: Any, **options: Any) -> Any:
        batch, states = self._batch, args[0] if args else None
        if batch is None or states is None or not self._can_pick:
            return forward(*args, **options)
        # Once the shape differs, never pick again: [Q, B, width] is like [B, Q, width] if B = Q.
        self._can_pick = states.dim() == 3 and states.shape[:2] == batch.input_ids.shape
        if self._can_pick:
            self._is_picked = True
            picked = states.transpose(0, 1) if batch.is_decode else _at_outputs(states, batch)[None]
            args = picked, *args[1:]
        return forward(*args, **options)

    # ---------------------------------------------------------------- another view

    def another(self) -> ModelView:
        view = ModelView(self._model, names_ours=self._names_ours, is_apart=bool(self.copies))
        view._can_pick = self._can_pick
        return view


def _at_outputs(states: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """Return ``states``, ``[B, Q, …]``, at the outputs of a batch: ``[num_outputs, …]``."""
    rows, columns = batch.output_rows.to(states.device), batch.output_columns.to(states.device)
    return states[rows, columns]


def _is_compiled(module: nn.Module) -> bool:
    own = vars(module)
    return own.get("_compiled_call_impl") is not None or hasattr(own.get("forward"), AS_WRITTEN)


def _is_bound(value: Any) -> bool:
    return isinstance(value, (nn.Module, PretrainedConfig, MethodType, partial))


# -------------------------------------------------------------------- making a view


@torch.inference_mode()
def view_of(model: Any, token_ids: torch.Tensor, **options: Any) -> ModelView:
    """Return a view of copies, or one that runs the model itself if a trial of copies fails."""
    name, is_compiled = type(model).__name__, any(map(_is_compiled, model.modules()))
    for _ in range(2):  # the first pass initialises some quantised layers, and may differ
        # A compiled model is not run: it rounds differently, and a trial should not compile it.
        own = None if is_compiled else model(input_ids=token_ids, **options)
        try:
            view = ModelView(model)
            with _left_by(view) as left:
                found = view.module(input_ids=token_ids, **options)
        except Exception as error:  # third-party model code may raise anything
            why = "making or running the copies failed"
            logger.info("%s will run its own modules, not copies: %s", name, why, exc_info=error)
            return ModelView(model, is_apart=False)
        # ``left`` has the originals that ran: code found them otherwise than by attributes.
        if not left and _have_equal_logits(found if own is None else own, found):
            return view
        view.close()
    why = "the copies call the originals or give other logits"
    logger.info("%s will run its own modules, not copies: %s", name, why)
    return ModelView(model, is_apart=False)


def _have_equal_logits(output: Any, other: Any) -> bool:
    first, second = (getattr(one, "logits", None) for one in (output, other))
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


@contextlib.contextmanager
def _left_by(view: ModelView) -> Iterator[list[nn.Module]]:
    """Collect in a list the model's own modules that run on this thread within the block."""
    thread, left = threading.get_ident(), list[nn.Module]()

    def note(module: nn.Module, _: object) -> None:
        if threading.get_ident() == thread and module in view.copies:
            left.append(module)

    hook = register_module_forward_pre_hook(note)
    try:
        yield left
    finally:
        hook.remove()
