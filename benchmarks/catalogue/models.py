"""Models: scoring, steps, what happens beside them, and how their cost grows."""

from __future__ import annotations

from benchmarks import dressing, growth, host, running_states, sharing, trace, workloads
from benchmarks.workload import SHARE, Found, Numbers, Row, Workload, median


class ScoreQuery(Workload):
    """200 texts scored, against padded batches through the model."""

    name = "scoring"
    variants = ("200", "20")

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.scoring(repeats, int(variant))

    def rows(self, found: Found) -> list[Row]:
        table: list[Row] = []
        for batch_size, numbers in found.items():
            ours, theirs = median(numbers["ours_s"]), median(numbers["theirs_s"])
            share = median(numbers["limit_s"]) / ours
            texts = f"scoring {numbers['num_texts']} texts, `batch_size={batch_size}`"
            table += [
                (f"{texts}, tokens per second", f"{numbers['num_tokens'] / ours:.0f}", ""),
                ("… over padded batches through the model alone", f"{theirs / ours:.2f}×", ""),
                (SHARE, f"{share:.0%}", ""),
            ]
        return table


class StepOverhead(Workload):
    """A step of 5 particles at batch_size 20, against the bare forward of the same 5 tokens."""

    name = "step_overhead"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.step_overhead(repeats)

    def rows(self, found: Found) -> list[Row]:
        ours, bare = (median(found[""][key]) for key in ("ours_ms", "bare_ms"))
        what = f"5 particles at `batch_size` 20: step over the bare forward ({bare:.0f} ms)"
        return [(what, f"{ours - bare:+.1f} ms", "+3 ms")]


class Host(Workload):
    """What a step of 100 particles costs the host, by the length of their context."""

    name = "host"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return host.host(repeats)

    def rows(self, found: Found) -> list[Row]:
        ms = {name: median(values) for name, values in found[""].items()}
        short, long = min(host.SIZES), max(host.SIZES)
        what = f"100 particles: host's work of a step at {long:,} tokens, ms more than at {short}"
        return [
            (f"{what}, {label}", f"{ms[f'{kind}, {long}'] - ms[f'{kind}, {short}']:.1f}", aim)
            for kind, label, aim in (
                ("list", "plain lists", "6"),
                ("context", "`lm.context`", "0.5"),
            )
        ]


class ManyParticles(Workload):
    """What a step of many particles costs the host."""

    name = "many_particles"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return host.many(repeats)

    def rows(self, found: Found) -> list[Row]:
        ms = {name: median(values) for name, values in found[""].items()}
        return [
            (f"{count:,} particles: host's work of a step, mean, {label}", f"{ms[key]:.1f} ms", "")
            for count in host.MANY
            for kind, label in (
                ("await", "an `await` each"),
                ("await, frozen", "… after `gc.freeze()`"),
                ("call", "one call for all"),
                ("call, wide", "one call for all, 49,152 logits and thirty layers"),
                ("draws", "one call of draws for all"),
                ("group", "a particle group's draws"),
            )
            for key, label in (
                (f"{kind}, {count}", label),
                (f"{kind}, {count}, cpu", f"{label}, CPU"),
            )
            if key in ms
        ]


class Readings(Workload):
    """What it takes to decide how a step reads what is cached."""

    name = "readings"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return host.plan(repeats)

    def rows(self, found: Found) -> list[Row]:
        ms = {name: median(values) for name, values in found[""].items()}
        wide = "256 particles behind 4,000 shared tokens, 100 of their own: how they are read"
        ratio = ms["forked"] / ms["unforked"]
        return [
            (f"{wide}, decided anew", f"{ms['anew']:.2f} ms", ""),
            (f"{wide}, from the step before", f"{ms['stepped']:.3f} ms", ""),
            (
                "… a lineage forked at each of 2,000 tokens over an unforked one",
                f"{ratio:.1f} ×",
                "1",
            ),
        ]


class AwaitedQueries(Workload):
    """What an awaited query costs the host beside its evaluation, 20 to 1,000 at once."""

    name = "awaited_queries"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return host.awaited(repeats)

    def rows(self, found: Found) -> list[Row]:
        us = {name: median(values) for name, values in found[""].items()}
        return [
            (
                f"an awaited query, {count:,} at once: {label}, CPU",
                f"{us[f'{name}, {count}, cpu']:.1f} µs",
                aim,
            )
            for count in host.AT_ONCE
            for name, label, aim in (
                ("asyncio", "a task and a future alone", ""),
                ("batcher", "`Batcher`", "15"),
                ("model", "`BatchedLM`, rows of 1,000", "25"),
                ("kept", "… with the row cache", ""),
                ("padded", "… 24 ids that are no token's", ""),
            )
        ]


class Trace(Workload):
    """How much of this library one awaited row goes through."""

    name = "trace"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return trace.trace()

    def rows(self, found: Found) -> list[Row]:
        numbers = found[""]
        what = f"one of {numbers['rows']} awaited rows of a warm step, one layer"
        path = f"{numbers['functions']} / {numbers['files']} / {numbers['classes']}"
        ours, theirs = numbers["operators_per_layer"], numbers["their_operators_per_layer"]
        return [
            (f"{what}: functions / files / classes of this library", path, ""),
            ("… calls of these functions a row", f"{numbers['calls_per_row']:.0f}", ""),
            ("… operators a layer and step, over those of transformers", f"{ours} / {theirs}", ""),
        ]


class Dressing(Workload):
    """What a batch costs beside the model, by how many of its layers have packed weights."""

    name = "dressing"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return dressing.dressing(repeats)

    def rows(self, found: Found) -> list[Row]:
        few, many = (median(found[""][f"{size}_ms"]) for size in dressing.NUM_LAYERS)
        what = f"a batch of {dressing.NUM_LAYERS[1]} layers over one, packed, the model left out"
        return [(what, f"{many - few:+.2f} ms", "0.3 ms")]


class RunningStates(Workload):
    """A step of a model with recurrent states, against the model with its own cache."""

    name = "running_states"
    variants = (*running_states.SIZES, "choosing")

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        if variant == "choosing":
            return running_states.choosing(repeats)
        return running_states.steps(repeats, variant)

    def rows(self, found: Found) -> list[Row]:
        table: list[Row] = []
        chosen = found.get("choosing", {})
        for kind, times in chosen.items():
            pool = kind.removesuffix("_ms")
            what = f"{running_states.NUM_PARTICLES} states of {pool} given to a step"
            table.append((what, f"{median(times):.2f} ms", "0.2 ms" if "free" in kind else ""))
        for size, numbers in found.items():
            if size == "choosing":
                continue
            who = f"Qwen3.5 of {size}, {running_states.NUM_PARTICLES} particles"
            for num_shared in running_states.BEHIND:
                ms = median(numbers[f"{num_shared} ours_ms"])
                what = (
                    f"{who} behind {num_shared:,}: a step ({ms:.0f} ms) over the model's own cache"
                )
                table.append((what, f"{running_states.ratio(numbers, num_shared):.2f}×", "1.3×"))
            if "own_sis_s" in numbers:
                times = median(numbers["own_sis_s"]) / median(numbers["ours_sis_s"])
                what = f"{who} behind 512, {running_states.NUM_DRAWN} tokens, over `generate`"
                table.append((what, f"{times:.1f}×", "1.0×"))
        return table


class PrefillMix(Workload):
    """A 512-token prefill with 19 one-token steps, against the two one after the other."""

    name = "prefill_mix"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.prefill_mix(repeats)

    def rows(self, found: Found) -> list[Row]:
        together, apart = (median(found[""][key]) for key in ("together_ms", "apart_ms"))
        what = f"512-token prefill with 19 steps, over the two apart ({apart:.0f} ms)"
        table: list[Row] = [(what, f"{together / apart:.2f}×", "1.2×")]
        if "limit_ms" in found[""]:
            share = median(found[""]["limit_ms"]) / together
            table.append((SHARE, f"{share:.0%}", ""))
        return table


class LoopStall(Workload):
    """The longest gap between two passes of the event loop while a long forward runs."""

    name = "loop_stall"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.loop_stall(repeats)

    def rows(self, found: Found) -> list[Row]:
        forward, stall = median(found[""]["forward_ms"]), max(found[""]["stall_ms"])
        what = f"longest stall of the loop during a forward of {forward:.0f} ms"
        return [(what, f"{stall:.0f} ms", "20 ms")]


class PythonMeanwhile(Workload):
    """A step of 10 particles alone, and while another thread computes in Python all the time."""

    name = "python_meanwhile"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.python_meanwhile(repeats)

    def rows(self, found: Found) -> list[Row]:
        alone, busy = (median(found[""][key]) for key in ("alone_ms", "busy_ms"))
        what = f"a step while another thread computes in Python, over alone ({alone:.0f} ms)"
        return [(what, f"{busy / alone:.1f}×", "")]


class Awaits(Workload):
    """Awaits per second with a forward pass that costs nothing, 100 concurrent callers."""

    name = "awaits"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.awaits(repeats)

    def rows(self, found: Found) -> list[Row]:
        return [
            (f"awaits per second, {name}", f"{median(values):,.0f}", "20,000")
            for name, values in found[""].items()
        ]


class SharedContext(Workload):
    """A step of particles behind a context that they share, read once or copied for each."""

    name = "shared_context"
    variants = ("shared", "gathered")
    is_repeated = True

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return sharing.measure(variant, repeats)

    def rows(self, found: Found) -> list[Row]:
        return sharing.rows(found)


class Growth(Workload):
    """How cost grows with particles, context and vocabulary, beside what is ideal."""

    name = "growth"
    table = "growth"
    variants = ("particles", "context", "shared_context", "vocabulary")

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return getattr(growth, variant)(repeats)

    def markdown(self, found: Found) -> str:
        return growth.markdown(found)
