"""Where the time of a captured decode step on a CUDA device goes, part by part.

``python -m benchmarks.device_quick steps profile host products attention small`` prints a line of
JSON for each finding. ``--device cpu`` tries the parts that need no graph. ``--tag`` names the tree
that is measured, so that two can be compared in one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import device_parts
from benchmarks.device_parts import bandwidth, bytes_of_weights, model_of, tokenizer_of

TAG, DEVICE, WIDTH = "", "cuda", 49152
CASES = ((512, 1), (512, 64), (512, 256), (512, 1024), (32768, 1024))
NUM_STEPS = 20


def tell(part: str, **found: Any) -> None:
    """Print a line of JSON."""
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}
    print(json.dumps({"tag": TAG, "part": part, **rounded}), flush=True)


def wait() -> None:
    """Wait for the device."""
    device_parts.wait(DEVICE)


class Walk(device_parts.Walk):
    """Particles that go on by a token each, in steps that are timed in milliseconds."""

    def __init__(self, lm: Any, length: int, count: int, distinct: bool = False) -> None:
        super().__init__(lm, WIDTH, length, count, DEVICE, distinct)

    def rows(self, number: int) -> list[float]:
        """Return the milliseconds of steps whose rows stay on the device."""
        return [1e3 * taken for taken in self.steps(number)]

    def drawn(self, number: int) -> list[float]:
        """Return the milliseconds of steps by draws."""
        return [1e3 * taken for taken in self.draws(number)]


class Events:
    """Milliseconds of replays on the device, and of captures on the host."""

    def __init__(self) -> None:
        from genlm_backend.backends.hf import cuda_graph_runner

        self.pairs: list[Any] = []
        self.captures: list[float] = []
        if DEVICE != "cuda":
            return
        replay, record = (
            cuda_graph_runner.CapturedGraph.replay,
            cuda_graph_runner.CudaGraphCapturer.record,
        )

        def timed(captured: Any, *given: Any) -> Any:
            pair = [torch.cuda.Event(enable_timing=True) for _ in "se"]
            pair[0].record()
            found = replay(captured, *given)
            pair[1].record()
            self.pairs.append(pair)
            return found

        def captured(recorder: Any, run: Any) -> Any:
            wait()
            start = time.perf_counter()
            found = record(recorder, run)
            wait()
            self.captures.append(1e3 * (time.perf_counter() - start))
            return found

        cuda_graph_runner.CapturedGraph.replay = timed  # pyright: ignore[reportAttributeAccessIssue]
        cuda_graph_runner.CudaGraphCapturer.record = captured  # pyright: ignore[reportAttributeAccessIssue]

    def take(self) -> float:
        """Return the median of the replays since it was asked last."""
        wait()
        found = [start.elapsed_time(end) for start, end in self.pairs] or [0.0]
        self.pairs.clear()
        return statistics.median(found)


def steps(lm: Any, model: Any, speed: float) -> None:
    """Tell what steps take, rows and draws, beside the limit of the memory."""
    events, config = Events(), model.config
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * heads
    cases = [(*case, False) for case in CASES] + [(512, 64, True)] * (len(CASES) > 3)
    for length, count, distinct in cases:
        walk = Walk(lm, length, count, distinct)
        walk.rows(4)
        events.take()
        rows = walk.rows(NUM_STEPS)
        replay = events.take()
        walk.drawn(2)
        draws = walk.drawn(NUM_STEPS // 2)
        tokens = length * (count if distinct else 1) + NUM_STEPS * count
        limit = 1e3 * (bytes_of_weights(model) + tokens * per_token) / speed
        tell(
            "steps",
            length=length,
            particles=count,
            distinct=distinct,
            rows_ms=statistics.median(rows),
            rows_q=[round(q, 2) for q in statistics.quantiles(rows, n=4)],
            draws_ms=statistics.median(draws),
            replay_ms=replay,
            limit_ms=limit,
            over=statistics.median(rows) / limit,
            captures_ms=[round(one, 1) for one in events.captures],
            captured=lm.statistics().num_captured_steps,
        )
        events.captures.clear()
        lm.clear_cache()
    if DEVICE == "cuda":
        tell("memory", peak_GB=torch.cuda.max_memory_allocated() / 1e9)


def profile(lm: Any) -> None:
    """Tell which kernels five steps consist of."""
    from torch.profiler import ProfilerActivity, profile

    for count, kind in ((64, "rows"), (64, "draws"), (1024, "rows"), (1024, "draws")):
        walk = Walk(lm, 512, count)
        step = walk.rows if kind == "rows" else walk.drawn
        step(4)
        walls = step(5)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step(5)
        totals: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for event in found.events() or []:
            if event.device_type.name == "CUDA":
                totals[event.name][0] += 1
                totals[event.name][1] += event.time_range.elapsed_us()
        busy = sum(total for _, total in totals.values()) / 5
        tell("profile", particles=count, kind=kind, wall_us=1e3 * min(walls), busy_us=busy)
        for name, (number, total) in sorted(totals.items(), key=lambda one: -one[1][1])[:22]:
            tell("kernel", at=f"{count} {kind}", us=total / 5, n=number / 5, name=name[:110])
        lm.clear_cache()


def host(lm: Any) -> None:
    """Tell what the stages of a step take on the host, in microseconds."""
    from genlm_backend.attention.cascade_plan import CachedPrefixes
    from genlm_backend.backends.hf import cuda_graph_runner, hf_runner
    from genlm_backend.backends.hf.cuda_graph_run import DecodeArrays
    from genlm_backend.backends.hf.decode_tables import DecodeTables
    from genlm_backend.prefix import prefix_tree
    from genlm_backend.scheduling import local_evaluator, scheduler

    spent: defaultdict[str, list[float]] = defaultdict(list)
    undo: list[Callable[[], None]] = []

    def watch(owner: Any, name: str, label: str) -> None:
        original = vars(owner)[name]
        function = getattr(original, "__func__", original)

        def timed(*given: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*given, **options)
            finally:
                spent[label].append(1e6 * (time.perf_counter() - start))

        made = classmethod(timed) if isinstance(original, classmethod) else timed
        setattr(owner, name, made)
        undo.append(lambda: setattr(owner, name, original))

    for owner, name in (
        (local_evaluator.LocalEvaluator, "evaluate"),
        (scheduler.Scheduler, "_run_cached"),
        (scheduler.Scheduler, "decode"),
        (scheduler.Scheduler, "is_decode"),
        (scheduler.Scheduler, "_decode_plan"),
        (scheduler, "pack_decode"),
        (prefix_tree.PrefixTree, "match_all"),
        (prefix_tree.PrefixTree, "allocate"),
        (prefix_tree.PrefixTree, "append"),
        (prefix_tree.PrefixTree, "insert"),
        (CachedPrefixes, "of"),
        (hf_runner.HFRunner, "forward"),
        (hf_runner.HFRunner, "_check"),
        (cuda_graph_runner.CudaGraphRunner, "plan"),
        (cuda_graph_runner.CudaGraphRunner, "_of"),
        (cuda_graph_runner.CudaGraphRunner, "replayed"),
        (DecodeTables, "of"),
        (DecodeArrays, "fill"),
        (local_evaluator, "rows_of_logits"),
        (local_evaluator, "answers_by_rows"),
    ):
        label = str(getattr(owner, "__name__", "")).split(".")[-1]
        watch(owner, name, f"{label}.{name}")
    for count in (1, 64, 1024):
        for kind in ("rows", "draws"):
            walk = Walk(lm, 512, count)
            step = walk.rows if kind == "rows" else walk.drawn
            step(5)
            spent.clear()
            walls = step(NUM_STEPS)
            stages = {k: round(statistics.median(v), 1) for k, v in spent.items() if len(v) > 9}
            tell("host", at=f"{count} {kind}", wall_us=1e3 * statistics.median(walls), **stages)
            lm.clear_cache()
    for back in undo:
        back()


def graph_us(run: Callable[[], Any], repeats: int = 9) -> float:
    """Return the microseconds of a captured function on the device."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(end))
    return statistics.median(found)


def products(speed: float) -> None:
    """Tell what the products of the 1B shape take: apart, and with merged weights."""
    from torch.nn.functional import linear

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02

    layers = [
        [weight(3072, 2048), weight(2048, 2048), weight(16384, 2048), weight(2048, 8192)]
        for _ in range(16)
    ]
    head = weight(128256, 2048)
    for rows in (1, 64, 256, 1024):
        x, wide = weight(rows, 2048), weight(rows, 8192)

        def apart(x: Any = x, wide: Any = wide) -> None:
            for qkv, out, gate_up, down in layers:
                for part in (qkv[:2048], qkv[2048:2560], qkv[2560:]):
                    linear(x, part)
                linear(x, out)
                for part in (gate_up[:8192], gate_up[8192:]):
                    linear(x, part)
                linear(wide, down)

        def merged(x: Any = x, wide: Any = wide) -> None:
            for qkv, out, gate_up, down in layers:
                linear(x, qkv)
                linear(x, out)
                linear(x, gate_up)
                linear(wide, down)

        def each(index: int, given: Any) -> float:
            return graph_us(lambda: [linear(given, layer[index]) for layer in layers]) / 16

        found = {"apart_us": graph_us(apart), "merged_us": graph_us(merged)}
        found |= {
            "qkv_us": each(0, x),
            "out_us": each(1, x),
            "gate_up_us": each(2, x),
            "down_us": each(3, wide),
        }
        found["gate_us"] = graph_us(lambda x=x: [linear(x, y[2][:8192]) for y in layers]) / 16
        found["head_us"] = graph_us(lambda x=x: linear(x, head))
        layer_bytes = 16 * sum(part.nbytes for part in layers[0])
        tell("products", rows=rows, **found, limit_us=1e6 * layer_bytes / speed)


def attention() -> None:
    """Tell what extents of room for 4, 16 and 64 take, and cuDNN for long ones."""
    from genlm_backend.backends.hf.decode_ops import decode_ops_for

    ops = decode_ops_for(torch.device(DEVICE), torch.bfloat16, 64, 4)
    if ops is None:
        tell("attention", failed="no operators")
        return
    for rows, length in ((64, 512), (1024, 512), (64, 4096), (1024, 32768)):
        query = torch.randn(rows * 4, 8, 64, device=DEVICE, dtype=torch.bfloat16)
        codes = torch.randn(length, 1024, device=DEVICE, dtype=torch.bfloat16)
        keys, values = (part.unflatten(1, (8, 64)) for part in codes.chunk(2, 1))
        line: dict[str, Any] = {"rows": rows, "length": length}
        for room in (1, 4, 16, 64):
            bounds = torch.full((room + 1,), rows * 4, dtype=torch.int32, device=DEVICE)
            bounds[0] = 0
            starts = torch.zeros(room + 1, dtype=torch.int32, device=DEVICE)
            sizes = torch.zeros(room, dtype=torch.int32, device=DEVICE)
            sizes[0] = length

            def attend(q: Any = query, k: Any = keys, v: Any = values, b: Any = bounds,
                       s: Any = starts, z: Any = sizes, n: int = rows * 4) -> Any:  # fmt: skip
                return ops.in_extents(q, k, v, b, s, z, n, 0.125)

            line[f"room_{room}_us"] = graph_us(attend)
        ways = _long_ways(query, keys, values)
        for name, call in ways.items():
            try:
                line[f"{name}_us"] = graph_us(call)
            except Exception as error:  # what a release does not take
                line[name] = f"{type(error).__name__}: {error}"[:200]
        tell("attention", **line)


def _long_ways(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    """Return other operators for one extent, of a fixed shape."""
    aten = torch.ops.aten
    q, k, v = (part.transpose(0, 1)[None] for part in (query, keys, values))
    return {
        "cudnn": lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True),
        "flash": lambda: aten._scaled_dot_product_flash_attention(q, k, v),
    }  # fmt: skip


def small() -> None:
    """Tell what the elementwise kernels of a layer take, apart and fused."""
    from torch.nn import functional

    try:
        from genlm_backend.backends.hf.layer_kernels import fused_add_rms_norm, silu_and_mul
    except Exception as error:  # no Triton
        tell("small", failed=str(error))
        return
    for rows in (1, 64, 256, 1024):

        def numbers(width: int, rows: int = rows) -> torch.Tensor:
            return torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)

        x, r, w, both = (*map(numbers, (2048, 2048)), numbers(2048)[0], numbers(16384))
        g, u = (half.contiguous() for half in both.chunk(2, 1))

        def norms(x: Any = x, r: Any = r, w: Any = w) -> Any:
            s = r + x
            return s, functional.rms_norm(s, (2048,), w, 1e-5)

        def gates(g: Any = g, u: Any = u) -> Any:
            return functional.silu(g) * u

        pairs = (
            ("norm", norms, lambda x=x, r=r, w=w: fused_add_rms_norm(x, r, w, 1e-5)),
            ("gate", gates, lambda both=both: silu_and_mul(both)),
        )
        line: dict[str, Any] = {"rows": rows}
        for name, plain, fused in pairs:
            line[f"{name}_us"] = graph_us(lambda f=plain: [f() for _ in range(32)]) / 32
            line[f"{name}_fused_us"] = graph_us(lambda f=fused: [f() for _ in range(32)]) / 32
            expected, found = plain(), fused()
            a, b = (one[1] if isinstance(one, tuple) else one for one in (expected, found))
            line[f"{name}_off"] = float((a.float() - b.float()).abs().max())
        tell("small", **line)


def main() -> None:
    """Run parts."""
    global TAG, DEVICE, WIDTH, NUM_STEPS, CASES
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tag", default="")
    parser.add_argument("--model", default="Llama-3.2-1B")
    parser.add_argument("--few", action="store_true", help="steps of three sizes alone")
    options = parser.parse_args()
    TAG, DEVICE = options.tag, options.device
    began = time.perf_counter()
    if options.few:
        CASES = CASES[:3]
    if DEVICE == "cpu":
        NUM_STEPS, CASES = 2, ((64, 1), (64, 4))
    from genlm_backend import AsyncTransformer

    speed = bandwidth(DEVICE)
    tell("machine", GB_per_s=speed / 1e9, torch=torch.__version__)
    lm = model = None
    with torch.inference_mode():
        alone: dict[str, Callable[[], None]] = {
            "products": lambda: products(speed),
            "attention": attention,
            "small": small,
        }
        for part in options.parts:
            start = time.perf_counter()
            try:
                if part in alone:
                    alone[part]()
                    continue
                if lm is None:
                    with torch.inference_mode(False):  # or its parameters were of that mode
                        model = model_of(options.model, DEVICE, torch.bfloat16)
                    WIDTH = model.config.vocab_size
                    given = {"row_cache_bytes": 0, "output_device": DEVICE, "batch_size": 1024}
                    given["packs_weights"] = True  # as models are loaded by name
                    tokenizer = tokenizer_of(model.config.vocab_size)
                    lm = AsyncTransformer(model, tokenizer, self_check=False, **given)
                if part == "steps":
                    steps(lm, model, speed)
                else:
                    {"profile": profile, "host": host}[part](lm)
            except Exception as error:  # the other parts may do
                tell(part, failed=f"{type(error).__name__}: {error}"[:600])
            finally:
                tell("took", of=part, seconds=time.perf_counter() - start)
    if lm is not None:
        lm.close()
    tell("took", of="all", seconds=time.perf_counter() - began)


if __name__ == "__main__":
    main()
