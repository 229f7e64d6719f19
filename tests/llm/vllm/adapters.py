"""LoRA adapters for the tiny model, and the models that they amount to."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.llm.vllm import real

RANK, ALPHA = 8, 32


def make_adapter(folder, seed, model=None):
    """Write a random adapter in PEFT's format; return the model with it merged in."""
    generator = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(real.tiny_model() if model is None else model)
    tensors = {}
    for name, module in merged.named_modules():
        if name.endswith(("q_proj", "v_proj", "down_proj")):
            a = torch.randn(RANK, module.in_features, generator=generator) * 0.2
            b = torch.randn(module.out_features, RANK, generator=generator) * 0.2
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            module.weight.data += ALPHA / RANK * b @ a
    folder = Path(folder)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "tiny",
                "r": RANK,
                "lora_alpha": ALPHA,
                "target_modules": ["q_proj", "v_proj", "down_proj"],
                "bias": "none",
            }
        )
    )
    return merged
