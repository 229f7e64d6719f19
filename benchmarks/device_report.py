"""From what ``make gpu`` has found on a device to the tables and the chart of the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Line = dict[str, Any]


def device_tables(lines: list[Line]) -> dict[str, str]:
    """Return the tables of steps and of tries on a device: file → Markdown.

    Args:
        lines: The lines of ``results.jsonl``.
    """
    seen = _about(lines)
    steps = [
        "| model | shared tokens | particles | a step | resampled | by draws "
        "| operator by operator | vLLM | the limit | over it | host |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    of_vllm = {
        _case(line): f"{line['step_ms']:.1f} ms"
        for line in lines
        if line["from"].startswith("vllm") and "step_ms" in line
    }
    for line in _steps(lines):
        eager, host = f"{line['eager_ms']:.0f} ms", f"{line['host_ms']:.1f} ms"
        drawn = f"{line['draws_ms']:.1f} ms" if "draws_ms" in line else ""
        vllm = of_vllm.get(_case(line), "")
        steps.append(
            f"| {line['model']} | {line['shared_tokens']:,} | {line['particles']:,} "
            f"| {line['step_ms']:.1f} ms | {line['smc_ms']:.1f} ms | {drawn} | {eager} | {vllm} "
            f"| {line['limit_ms']:.2f} ms | {line['over_limit']:.1f} | {host} |"
        )
    tries = [
        "| of 100 rows of 131,000 tokens on the device | measured | over the limit |",
        "|---|---|---|",
    ]
    for line in lines:
        if "what" in line and "ms" in line:
            tries.append(f"| `{line['what']}` | {line['ms']:.2f} ms | {line['over_limit']:.0f} |")
    return {
        "device": "\n".join([*steps, "", seen]) + "\n",
        "device_tries": "\n".join([*tries, "", seen]) + "\n",
    }


def device_chart(lines: list[Line], folder: Path) -> None:
    """Draw a resampled step of some model by particles, recorded and as it was, and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    model, length = "Llama-3.2-1B", 4096
    own = [x for x in _steps(lines) if (x["model"], x["shared_tokens"]) == (model, length)]
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    counts = [line["particles"] for line in own]
    for key, label, style in (
        ("eager_ms", "operator by operator", "o-"),
        ("smc_ms", "recorded", "o-"),
        ("limit_ms", "the limit", "--"),
    ):
        color = {"eager_ms": "#b0b7c3", "smc_ms": "#3f51b5", "limit_ms": "#9aa3b5"}[key]
        axes.loglog(counts, [line[key] for line in own], style, color=color, label=label)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set_xticks([], minor=True)
    axes.set_yticks(ticks := (1, 2, 5, 10, 20, 50), [f"{tick}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set(
        xlabel=f"particles behind {length:,} shared tokens, {_name(lines)}", ylabel="ms a step"
    )
    axes.legend(fontsize=8, loc=(0.02, 0.1))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "device.png", dpi=150)
    plt.close(figure)


def _case(line: Line) -> tuple[str, int, int]:
    return line["model"], line["shared_tokens"], line["particles"]


def _steps(lines: list[Line]) -> list[Line]:
    return [line for line in lines if "over_limit" in line and "particles" in line]


def _name(lines: list[Line]) -> str:
    machine = next(line for line in lines if line.get("driver"))
    return f"Llama-3.2-1B in bfloat16, {machine['name']}"


def _about(lines: list[Line]) -> str:
    machine = next(line for line in lines if line.get("driver"))
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "transformers", "vllm") if machine.get(name)
    )
    return (
        f"Measured by `make gpu OUT=folder` on one {machine['name']} with driver "
        f"{machine['driver']}, CUDA {machine['cuda']}, Python {machine['python']}, {versions}; "
        "weights are random."
    )
