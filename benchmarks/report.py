"""From lines of results to the tables and charts of the docs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.catalogue import WORKLOADS
from benchmarks.workload import Found, merged

Line = dict[str, Any]


def found_of(lines: list[Line], name: str) -> Found:
    """The numbers of a workload by variant, rounds put together."""
    by_variant: dict[str, list[Any]] = defaultdict(list)
    for line in lines:
        if line["workload"] == name:
            by_variant[line["variant"]].append(line["numbers"])
    order = WORKLOADS[name].variants
    return {variant: merged(by_variant[variant]) for variant in order if variant in by_variant}


def tables(lines: list[Line]) -> dict[str, str]:
    """Return each table of the docs: file → Markdown, with what it was measured on."""
    made = {}
    for table in dict.fromkeys(workload.table for workload in WORKLOADS.values()):
        parts, rows, used = [], [], []
        for name, workload in WORKLOADS.items():
            found = found_of(lines, name)
            if workload.table != table or not found:
                continue
            used += [line for line in lines if line["workload"] == name]
            if table == "benchmarks":
                rows += workload.rows(found)
            else:
                parts.append(workload.markdown(found))
        if rows:
            parts.append(
                "\n".join(
                    ["| what | measured | aim |", "|---|---|---|"]
                    + [f"| {' | '.join(row)} |" for row in rows]
                )
            )
        parts.append(about(used) if used else "Nothing of this has been measured yet.")
        made[table] = "\n\n".join(parts) + "\n"
    return made


def about(lines: list[Line]) -> str:
    """Say by which commands, on which machine and with which versions."""
    commands = " and ".join(dict.fromkeys(f"`{line['command']}`" for line in lines))
    sentences = []
    seen = dict.fromkeys((line["machine"], tuple(line["versions"].items())) for line in lines)
    merged_versions: dict[str, dict[str, str]] = defaultdict(dict)
    for machine, versions in seen:
        merged_versions[machine].update(versions)
    for machine, versions in merged_versions.items():
        peer = versions.pop("the peer", None)
        named = ", ".join(f"{name} {number}" for name, number in versions.items())
        sentences.append(f"{machine}, {named}" + (f"; the peer is {peer}" if peer else ""))
    return f"Measured by {commands} on {' and on '.join(sentences)}."


def charts(lines: list[Line], folder: Path) -> None:
    """Draw the tokens per second of each system, and how cost grows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    from benchmarks.workload import median

    sis = found_of(lines, "sis")
    rate = {name: median(numbers["tokens_per_second"]) for name, numbers in sis.items()}
    rate = dict(sorted(rate.items(), key=lambda item: item[1]))
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    colors = ["#3f51b5" if name == "genlm_backend" else "#b0b7c3" for name in rate]
    bars = axes.barh(list(rate), list(rate.values()), color=colors)
    axes.bar_label(bars, fmt="%.0f", padding=4)
    axes.set_xlabel("tokens per second, 20 particles, SmolLM2-135M in float32 on 2 CPU threads")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)
    figure.savefig(folder / "benchmarks.png", dpi=150)
    plt.close(figure)

    growth = found_of(lines, "growth")
    if not growth:
        return
    figure, many = plt.subplots(1, len(growth), figsize=(9, 2.8), layout="constrained")
    for axes, (name, numbers) in zip(many, growth.items(), strict=True):
        for key, label in (
            ("step_s", "a step"),
            ("build_s", "building a trie"),
            ("sum_s", "sums of a row"),
        ):
            if key in numbers:
                axes.loglog(numbers["sizes"], [1e3 * s for s in numbers[key]], "o-", label=label)
        limit = [1e3 * s for s in numbers["limit_s"]]
        axes.loglog(numbers["sizes"], limit, "--", color="#9aa3b5", label="the limit")
        labels = [f"{n // 1000}k" if n >= 1000 else str(n) for n in numbers["sizes"]]
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(numbers["sizes"], labels)
        low, high = axes.get_ylim()
        steps = (1, 1.5, 2, 3, 4, 6, 8) if high < 30 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set(xlabel=name.replace("_", " "), ylabel="ms")
        axes.legend(fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "growth.png", dpi=150)
    plt.close(figure)
