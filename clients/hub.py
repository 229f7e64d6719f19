"""A Hugging Face cache in which the names that the clients' suites load are a small real model."""

from __future__ import annotations

import shutil
from pathlib import Path

NAMES = ("gpt2", "gpt2-medium", "openai-community/gpt2", "HuggingFaceTB/SmolLM-135M")
ADAPTER = "vxef/smol_lora_toy"
NUM_LAYERS = 4
REVISION = "0" * 40


def make_hub(folder: Path) -> None:
    """Fill ``folder``, an ``HF_HUB_CACHE``, with the bundled model, cut to its first layers.

    Four of its thirty layers answer six times as fast, and hardly a test asks what the text says.
    Beside it lies an adapter with random weights.
    """
    model, adapter = folder / "model", folder / "adapter"
    if not (adapter / "adapter_config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        save_cut_model(model)
        _save_adapter(model, adapter)
    for name in NAMES:
        _link(folder, name, model)
    _link(folder, ADAPTER, adapter)


def _link(folder: Path, name: str, files: Path) -> None:
    """Make a repository of the cache out of a folder of files."""
    repository = folder / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    shutil.rmtree(repository, ignore_errors=True)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    for file in files.iterdir():
        (snapshot / file.name).symlink_to(file)


def _save_adapter(model: Path, folder: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    partial = folder.with_name("partial")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(
        str(partial)
    )
    partial.rename(folder)


def save_cut_model(folder: Path) -> None:
    """Save the bundled model, cut to its first layers, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from genlm_backend.llm import bundled_directory

    bundled = bundled_directory("smollm2")
    logging.set_verbosity_error()  # the layers that are left out are known
    model = AutoModelForCausalLM.from_pretrained(bundled, num_hidden_layers=NUM_LAYERS)
    partial = folder.with_name("partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(bundled).save_pretrained(partial)
    partial.rename(folder)
