"""Tests of adapters need PEFT, which the environment of vLLM does not have."""

from importlib.util import find_spec

import pytest

from genlm_backend.attention import cascade_plan as sharing
from genlm_backend.attention.torch import torch_ops

collect_ignore = [] if find_spec("peft") else ["test_adapter_kinds.py", "test_lora.py"]


@pytest.fixture(autouse=True)
def shared_early(monkeypatch):
    """A few cached tokens are worth reading together, or contexts of tests never would be."""
    monkeypatch.setattr(sharing, "FEW_TOKENS", 4)
    monkeypatch.setattr(torch_ops, "SHORTEST_STRETCH", 1)
