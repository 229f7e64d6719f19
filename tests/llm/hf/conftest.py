"""Tests of adapters need PEFT, which the environment of vLLM does not have."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("peft") else ["test_adapter_kinds.py", "test_lora.py"]
