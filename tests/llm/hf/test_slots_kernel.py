"""The launch of the kernel of slots; Triton, which is not on every machine, is stood in for."""

import importlib.util
import sys
from types import ModuleType

import torch

NAME = "genlm_backend.backends.hf.decode_kernels"


def test_kernel_is_launched_on_device_of_queries(monkeypatch):
    current, launched = [], []

    class DeviceOf:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            current.append(self.tensor)

        def __exit__(self, *_):
            current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((args[0], *current))

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    language.constexpr = int
    triton.language, triton.next_power_of_2 = language, lambda n: 1 << (n - 1).bit_length()
    triton.jit = lambda function=None, **_: Kernel() if function else lambda function: Kernel()
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    spec = importlib.util.find_spec(NAME)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    slots, bounds = torch.zeros(5, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    splits = torch.empty(2, 0, dtype=torch.int64)
    module.attend_in_slots(
        torch.randn(2, 4, 16), torch.randn(9, 64), slots, bounds, bounds, None, splits, None, 1.0, 2
    )
    ((query, *devices),) = launched
    assert len(devices) == 1
    assert devices[0] is query
