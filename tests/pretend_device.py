"""A device that is not there: tensors of the processor that say they are on it.

An operator that is given tensors of both raises, as it does on a device, so that what computes on
one is tried on every machine: each tensor where it belongs, and the same numbers. Counted is how
often the processor would have waited for it. Whoever imports this has such a device until the
process ends; so it is for processes of their own.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend(rename="pretend")

DEVICE = torch.device("pretend:0")

_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_INDEXED = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
}
_aten = torch.ops.aten
_WAITS = {
    _aten.item.default,
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten.allclose.default,
    _aten.repeat_interleave.Tensor,
    _aten._unique2.default,
}


def is_there(device):
    """Whether a device is the one that is not there."""
    return device is not None and torch.device(device).type == DEVICE.type


def _flash(query, keys, values, dropout=0.0, is_causal=False, debug=False, *, scale=None):
    """Attend as the operator of CUDA does, which takes halves only."""
    assert query.dtype in (torch.float16, torch.bfloat16), f"flash attention of {query.dtype}"
    assert query.shape[-1] % 8 == 0
    found = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, is_causal=is_causal, scale=scale
    )
    return (*found, None, None, query.shape[2], keys.shape[2], found[1], found[1], found[1])


def _efficient(query, keys, values, bias, tells, dropout=0.0, is_causal=False, *, scale=None):
    """Attend as the other operator of CUDA does, whose sums are padded."""
    assert tells
    if bias is not None:
        assert bias.dtype is query.dtype
        assert bias.shape == (*query.shape[:3], keys.shape[2])
        assert not any(stride % 16 for stride in bias.stride()[:3])
    found, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, is_causal=is_causal, attn_mask=bias, scale=scale
    )
    padding = -sums.shape[2] % 32
    sums = torch.nn.functional.pad(sums, (0, padding), value=torch.inf)
    return found, sums, torch.zeros(()), torch.zeros(())


_STAND_INS = {
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
}


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=False,
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"OnDevice({self.inner!r})"

    def tolist(self):
        """Wait for the device, and return what is there."""
        PretendDevice.current.num_waits += 1
        return self.inner.tolist()

    def numpy(self):
        """Raise: an array is on the processor."""
        raise TypeError("a tensor on the device is no array")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return dispatched(function, args, kwargs or {})


class PretendDevice(TorchDispatchMode):
    """While inside, there is a device.

    Attributes:
        num_waits: How often the processor has waited for it.
    """

    current = None

    def __init__(self):
        super().__init__()
        self.num_waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return dispatched(function, args, kwargs or {}, self)


def dispatched(function, args, kwargs, mode=None):
    """Carry out an operator on the tensors within, and say where its results are."""
    mode = mode or PretendDevice.current
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    inside = [t for t in tensors if isinstance(t, OnDevice)]
    outside = [t for t in tensors if not isinstance(t, OnDevice) and t.dim()]
    if inside and outside and function not in _COPIES:
        # Advanced indexing takes indices of the processor, and waits until they are there.
        if function not in _INDEXED or not isinstance(args[0], OnDevice):
            shapes = [tuple(t.shape) for t in outside]
            raise RuntimeError(f"{function} of tensors on two devices; on the processor: {shapes}")
        mode.num_waits += 1
    targets = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.device)]
    goes_there = is_there(targets[0]) if targets else bool(inside)
    if inside and (function in _WAITS or not goes_there):
        mode.num_waits += 1
    given, options = tree_map_only(OnDevice, lambda t: t.inner, (args, kwargs))
    given, options = tree_map_only(torch.device, lambda _: torch.device("cpu"), (given, options))
    options.pop("pin_memory", None)
    if function in _STAND_INS:
        results = _STAND_INS[function](*given, **options)
    elif function is torch.ops.aten.histc.default and not given[0].is_floating_point():
        results = function(given[0].float(), *given[1:], **options).to(given[0].dtype)
    else:  # which the processor has for integers too
        results = function(*given, **options)
    if function is torch.ops.aten.copy_.default:
        mode.num_waits += isinstance(args[1], OnDevice) and not isinstance(args[0], OnDevice)
    first = function._schema.arguments[0].alias_info if function._schema.arguments else None
    if first is not None and first.is_write and isinstance(args[0], torch.Tensor):
        return args[0]
    return tree_map_only(torch.Tensor, OnDevice, results) if goes_there else results


@contextmanager
def pretending():
    """Have a device for as long as one is inside."""
    PretendDevice.current = mode = PretendDevice()
    with torch.inference_mode(), mode:
        yield mode


def moved(model):
    """Have the parameters and buffers of a model on the device, by their own values."""
    for module in model.modules():
        for of_kind in (module._parameters, module._buffers):
            for name, tensor in of_kind.items():
                if tensor is not None:
                    of_kind[name] = OnDevice(tensor.detach())
    return model


_kernels = torch.library.Library("aten", "IMPL")


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return OnDevice(torch.empty(size, dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    inner = source.inner if isinstance(source, OnDevice) else source
    (target.inner if isinstance(target, OnDevice) else target).copy_(inner)
    return target


# What ``torch.tensor(..., device=...)`` is made of, which asks no mode.
_kernels.impl("empty_strided", _empty_strided, "PrivateUse1")
_kernels.impl("empty.memory_format", _empty, "PrivateUse1")
_kernels.impl("_copy_from", _copy_from, "PrivateUse1")
