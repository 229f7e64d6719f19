"""From measurements to a table and a chart."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

Results = dict[str, Any]


def median(values: list[float]) -> float:
    return statistics.median(values)


def rates(results: Results) -> dict[str, float]:
    """Median tokens per second of each system over all rounds."""
    return {
        name: median([rate for numbers in rounds for rate in numbers["tokens_per_second"]])
        for name, rounds in results["sis"].items()
    }


def rows(results: Results) -> list[tuple[str, str, str]]:
    """What, measured, aim."""
    rate = rates(results)
    ours = rate["genlm_backend"]
    table = [("SIS, tokens per second", f"{ours:.0f}", "")]

    def ratio(label: str, name: str, aim: str) -> None:
        if name in rate:
            table.append((f"… over {label} ({rate[name]:.0f})", f"{ours / rate[name]:.1f}×", aim))

    ratio("the peer as it comes", "peer", "12×")
    ratio("the peer after `cache_kv`", "peer + cache_kv", "2.5×")
    ratio("transformers `generate`, same batch", "generate", "1.4×")
    smc, step, mix = results["smc"], results["step_overhead"], results["prefill_mix"]
    table.append(
        (
            f"SMC, tokens computed for {smc['distinct_tokens']} distinct new ones",
            str(smc["tokens_computed"]),
            "equal",
        )
    )
    bare = median(step["bare_ms"])
    table.append(
        (
            f"5 particles at `batch_size` 20: step over the bare forward ({bare:.0f} ms)",
            f"{median(step['ours_ms']) - bare:+.1f} ms",
            "+3 ms",
        )
    )
    apart = median(mix["apart_ms"])
    table.append(
        (
            f"512-token prefill with 19 steps, over the two apart ({apart:.0f} ms)",
            f"{median(mix['together_ms']) / apart:.2f}×",
            "1.2×",
        )
    )
    stall = results["loop_stall"]
    table.append(
        (
            f"longest stall of the loop during a forward of {median(stall['forward_ms']):.0f} ms",
            f"{max(stall['stall_ms']):.0f} ms",
            "20 ms",
        )
    )
    meanwhile = results["python_meanwhile"]
    alone = median(meanwhile["alone_ms"])
    table.append(
        (
            f"a step while another thread computes in Python, over alone ({alone:.0f} ms)",
            f"{median(meanwhile['busy_ms']) / alone:.1f}×",
            "",
        )
    )
    for name, values in results["awaits"].items():
        table.append((f"awaits per second, {name}", f"{median(values):,.0f}", "20,000"))
    table.append(
        ("`import genlm_backend`", f"{1e3 * results['import_time']['import_s']:.0f} ms", "100 ms")
    )
    decoding = results["decoding"]
    ours_ms = median(decoding["ours_ms"])
    table.append(("`decode_vocab`, 129,280 ids", f"{ours_ms:.0f} ms", "300 ms"))
    if "peer_ms" in decoding:
        peer_ms = median(decoding["peer_ms"])
        table.append((f"… over the peer's ({peer_ms:.0f} ms)", f"{peer_ms / ours_ms:.1f}×", ""))
    return table + rows_of_generation(results)


def rows_of_generation(results: Results) -> list[tuple[str, str, str]]:
    """What, measured, aim; of what stands above the models."""
    table = []
    if "sampling" in results:
        step, draws = (median(results["sampling"][key]) for key in ("step_ms", "draws_ms"))
        what = f"20 draws, of the step they belong to ({step:.0f} ms)"
        table.append((what, f"{100 * draws / step:.1f}%", "15%"))
    if "masks" in results:
        keys = ("step_ms", "masks_ms", "both_ms")
        step, masks, both = (median(results["masks"][key]) for key in keys)
        hidden = max(0.0, 1 - max(0.0, both - step) / masks)
        table.append(("a mask under a JSON schema, each of 20", f"{masks / 20:.2f} ms", ""))
        table.append(("… of which hidden behind the forward pass", f"{100 * hidden:.0f}%", ""))
    if "async_glm" in results:
        found = results["async_glm"]
        ratio = median(found["theirs_s"]) / median(found["ours_s"])
        what = f"AsyncGLM, {found['num_tasks']} tasks, over `generate` task by task"
        table.append((what, f"{ratio:.1f}×", "3×"))
    if "engine" in results:
        found = results["engine"]
        ours, theirs = median(found["ours_s"]), median(found["theirs_s"])
        what = f"Engine, {found['num_requests']} requests of 4 and 32 tokens, 20 at once"
        table.append((what, f"{found['num_tokens'] / ours:.0f} tokens/s", ""))
        table.append(("… over `generate` in padded batches of 20", f"{theirs / ours:.1f}×", ""))
        table.append(
            ("… median time to the first token", f"{median(found['first_token_s']):.2f} s", "")
        )
    return table


def markdown(results: Results) -> str:
    """Return the table, with what it was measured on."""
    lines = ["| what | measured | aim |", "|---|---|---|"]
    lines += [f"| {what} | {measured} | {aim} |" for what, measured, aim in rows(results)]
    return "\n".join(
        [*lines, "", f"Measured by `{results['command']}` on {results['machine']}.", ""]
    )


def markdown_of_tries(results: Results) -> str:
    """Return the tables of the tries, with what they were measured on."""
    speed = results["trie_speed"]
    batches = sorted({int(key.split()[1]) for key in next(iter(speed.values()))["ms"]["ours"]})
    lines = [
        f"| vocabulary, operation | {' / '.join(map(str, batches))} rows, ms "
        "| peer, sequential | peer, parallel | ratio to its faster |",
        "|---|---|---|---|---|",
    ]
    for name, found in speed.items():
        for operation in ("sum", "max"):
            keys = [f"{operation} {batch}" for batch in batches]
            columns = {
                system: " / ".join(milliseconds(times[key]) for key in keys)
                for system, times in found["ms"].items()
            }
            ours = found["ms"]["ours"]
            theirs = [times for system, times in found["ms"].items() if system != "ours"]
            ratios = " / ".join(
                f"{min(times[key] for times in theirs) / ours[key]:.0f}×" if theirs else ""
                for key in keys
            )
            lines.append(
                f"| {name}, {found['num_tokens']:,} tokens, {operation} | {columns['ours']} "
                f"| {columns.get('peer seq', '')} | {columns.get('peer par', '')} | {ratios} |"
            )
    lines += ["", "| building | seconds | MB it keeps | MB at most |", "|---|---|---|---|"]
    for name, found in speed.items():
        for system, build in found["build"].items():
            label = "" if system == "ours" else f", {system.replace('seq', 'sequential')}"
            label = label.replace("par", "parallel")
            lines.append(
                f"| {name}, {found['num_nodes']:,} nodes{label} | {build['seconds']:.2f} "
                f"| {build['stays_mb']:.0f} | {build['peak_mb']:.0f} |"
            )
    lines += [
        "",
        "| a hundred awaits of `weight_sum` at once | ms | over one batch call | longest stall |",
        "|---|---|---|---|",
    ]
    for name, found in results["trie_async"].items():
        for system, numbers in found.items():
            together, apart = median(numbers["async_ms"]), median(numbers["batch_ms"])
            label = "" if system == "ours" else f", {system}"
            lines.append(
                f"| {name}{label} | {milliseconds(together)} | {together / apart:.2f}× "
                f"| {milliseconds(median(numbers['stall_ms']))} ms |"
            )
    first = median(results["trie_first_call"]["seconds"])
    lines += [
        "",
        f"From a fresh interpreter to the first sums and maxima of Tekken, importing and building "
        f"included and the compiled code on disk: {first:.2f} s.",
    ]
    for name, found in results.get("trie_device", {}).items():
        lines += [
            "",
            f"| {name} on {found['device']} | whole call, ms | kernel | copying its bytes |",
            "|---|---|---|---|",
        ]
        for key, times in found["ms"].items():
            cells = " | ".join(f"{times[part]:.3f}" for part in ("whole", "kernel", "bytes"))
            lines.append(f"| {key} | {cells} |")
    return "\n".join(
        [*lines, "", f"Measured by `{results['command']}` on {results['machine']}.", ""]
    )


def markdown_of_virtual(results: Results) -> str:
    """Return the table of vLLM, with what it was measured on."""
    found = results.get("vllm")
    if found is None:
        return "No figure of vLLM is in this run.\n"
    rate: dict[str, list[float]] = {}
    for numbers in found["vllm_sis"]:
        for name, rates in numbers["tokens_per_second"].items():
            rate.setdefault(name, []).extend(rates)
    generate = median(rate["LLM.generate"])
    aims = {"SIS": "0.65×", "SMC, half replaced every 4 steps": "0.55×"}
    lines = [
        "| on one engine | tokens per second | over `LLM.generate` | aim |",
        "|---|---|---|---|",
    ]
    for name, rates in rate.items():
        label = f"`{name}`" if name in ("LLM.generate", "batch_sample") else name
        lines.append(
            f"| {label} | {median(rates):.0f} | {median(rates) / generate:.2f}× "
            f"| {aims.get(name, '')} |"
        )
    apart = {"`LLM.generate`, plain": "vllm_plain", "SIS, `AsyncTransformer`": "vllm_beside"}
    for label, key in apart.items():
        value = median([r for numbers in found[key] for r in numbers["tokens_per_second"]])
        lines.append(
            f"| {label}, in a process of its own | {value:.0f} | {value / generate:.2f}× | |"
        )
    release = found["vllm_sis"][0]["vllm"]
    return "\n".join(
        [
            *lines,
            "",
            "20 particles sample 16 tokens each behind one 51-token prompt, SmolLM2-135M, float32; "
            f"medians over rounds and repetitions, vLLM {release}.",
            "",
            f"Measured by `{results['command']}` on {results['machine']}.",
            "",
        ]
    )


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def chart(results: Results, path: Path) -> None:
    """Draw the tokens per second of each system."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rate = dict(sorted(rates(results).items(), key=lambda item: item[1]))
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    colors = ["#3f51b5" if name == "genlm_backend" else "#b0b7c3" for name in rate]
    bars = axes.barh(list(rate), list(rate.values()), color=colors)
    axes.bar_label(bars, fmt="%.0f", padding=4)
    axes.set_xlabel("tokens per second, 20 particles, SmolLM2-135M in float32 on 2 CPU threads")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)
    figure.savefig(path, dpi=150)
    plt.close(figure)
