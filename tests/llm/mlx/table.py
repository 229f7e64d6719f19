"""Where mlx-lm's rows are others than those of transformers, for every family that both have.

``python -m tests.llm.mlx.table`` asks each by the config that its class in transformers has by
default, and again with one entry changed at a time; names behind it are the families to ask.
A line tells the family, what mlx-lm says where it loads none, and what is farther apart than
activations are that one of the two approximates.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from mlx_lm.utils import _get_classes
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from genlm_backend.backends.mlx import differences
from genlm_backend.backends.mlx.mlx_loader import load_directory

_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 8.0},
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 8.0, "short_factor": [1.5] * 64, "long_factor": [2.0] * 64},
}


def is_known(family: str) -> bool:
    """Return whether mlx-lm has a module for a family."""
    try:
        _get_classes({"model_type": family})
    except (Exception, SystemExit):
        return False
    return True


def changes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config, each with another value."""
    for name, value in config.items():
        if name.startswith(("output_", "return_", "initializer", "use_cache")):
            continue
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, float) and math.isfinite(value) and "dropout" not in name:
            yield name, value * 1.5 if value else 0.5
        elif name in {"hidden_act", "activation_function", "hidden_activation"}:
            yield name, "relu" if value != "relu" else "silu"
        elif name in {"sliding_window", "attention_window_size"}:
            yield name, 64
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        for kind, others in _ROPES.items():
            own = {"rope_type": kind, "original_max_position_embeddings": 64, **others}
            yield "rope_parameters", {**rope, **own}


class _LastError(logging.Handler):
    """What went wrong last."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first line of it."""
        error = record.exc_info[1] if record.exc_info else None
        self.said = f"{type(error).__name__}: {error}".split("\n")[0][:120]


def main(families: list[str]) -> None:
    """Print a line for each family and each change that shows."""
    warnings.simplefilter("ignore")
    last = _LastError()
    differences.logger.addHandler(last)
    differences.logger.setLevel(logging.DEBUG)
    differences.logger.propagate = False
    for family in families or filter(is_known, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        config = CONFIG_MAPPING[family]().to_dict()
        found = differences.distances(config, load_directory)
        if not found:
            print(f"{family:20} none: {last.said}", flush=True)
            continue
        worst = max(found.values())
        print(f"{family:20} {worst:.1g}{' <--' if worst > differences.NOTABLE else ''}", flush=True)
        for name, value in changes(config):
            other = differences.distances({**config, name: value}, load_directory)
            if other and max(other.values()) > max(differences.NOTABLE, 2 * worst):
                shown = value["rope_type"] if isinstance(value, dict) else value
                print(f"    {name} = {shown!r}: {max(other.values()):.1g}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
