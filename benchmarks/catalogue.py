"""The workloads: what each measures, and what is shown of it."""

from __future__ import annotations

from benchmarks import clients, generation, growth, tries, virtual, workloads
from benchmarks.workload import Found, Numbers, Row, Workload, median

SYSTEMS = ("genlm_backend", "generate", "continuous batching", "peer + cache_kv", "peer")
FAST = {"genlm_backend", "peer + cache_kv", "generate"}
PEERS = ("peer + cache_kv", "peer")
LABELS = {
    "peer": "the peer as it comes",
    "peer + cache_kv": "the peer after `cache_kv`",
    "generate": "transformers `generate`, same batch",
    "continuous batching": "transformers' continuous batching",
}


SHARE = "… share of it that the matrix products alone take"


def ratios(found: Found, aims: dict[str, str], what: str) -> list[Row]:
    """Tokens per second of this library, and over those of the others."""
    rates = {name: median(numbers["tokens_per_second"]) for name, numbers in found.items()}
    ours = rates["genlm_backend"]
    table: list[Row] = [(f"{what}, tokens per second", f"{ours:.0f}", "")]
    for name in LABELS:
        if name in rates:
            label = f"… over {LABELS[name]} ({rates[name]:.0f})"
            table.append((label, f"{ours / rates[name]:.1f}×", aims.get(name, "")))
    limit = found["genlm_backend"].get("limit_s")
    if limit:
        took = median(found["genlm_backend"]["seconds"])
        share = f"{median(limit) / took:.0%}"
        table.append((SHARE, share, ""))
    return table


class Sis(Workload):
    """20 particles sample 16 tokens each behind one 51-token prompt, each with its own await."""

    name = "sis"
    variants = SYSTEMS
    peers = PEERS
    is_repeated = True

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.sis(variant, 3 if variant in FAST else 1)

    def rows(self, found: Found) -> list[Row]:
        aims = {"peer": "12×", "peer + cache_kv": "2.5×", "generate": "1.4×"}
        return ratios(found, aims, "SIS")


class LongPrompt(Workload):
    """32 particles sample 8 tokens each behind one 512-token prompt."""

    name = "long_prompt"
    variants = ("genlm_backend", "generate", "peer + cache_kv")
    peers = PEERS
    is_repeated = True

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.sis(variant, 1, 32, 8, 512)

    def rows(self, found: Found) -> list[Row]:
        return ratios(found, {}, "32 particles behind 512 tokens")


class Smc(Workload):
    """Tokens computed where half of the particles are replaced by copies every 4 steps."""

    name = "smc"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.smc(repeats)

    def rows(self, found: Found) -> list[Row]:
        numbers = found[""]
        what = f"SMC, tokens computed for {numbers['distinct_tokens']} distinct new ones"
        table: list[Row] = [(what, str(numbers["tokens_computed"]), "equal")]
        if "limit_s" in numbers:
            share = median(numbers["limit_s"]) / median(numbers["seconds"])
            table.append((SHARE, f"{share:.0%}", ""))
        return table


class Clients(Workload):
    """Programs on genlm-control and llamppl: 20 particles, up to 20 tokens each."""

    name = "clients"
    variants = ("control_regex", "control_regex, peer", "llamppl_words", "llamppl_words, peer")
    peers = ("control_regex, peer", "llamppl_words, peer")
    is_repeated = True
    needs = "clients"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return clients.client(variant.removesuffix(", peer"), 2)

    def rows(self, found: Found) -> list[Row]:
        table: list[Row] = []
        for example in ("control_regex", "llamppl_words"):
            numbers = found[example]
            took = median(numbers["seconds"])
            table.append((f"`examples/{example}.py`, seconds", f"{took:.1f}", ""))
            if theirs := found.get(f"{example}, peer"):
                took_there = median(theirs["seconds"])
                over = f"… on the peer ({took_there:.1f} s), over it"
                table.append((over, f"{took_there / took:.1f}×", ""))
            for label, own in (("", numbers), (" on the peer", theirs or {})):
                if own:
                    share = median(own["forward_s"]) / median(own["seconds"])
                    table.append((f"… share of it in forward passes{label}", f"{share:.0%}", ""))
        return table


class Scoring(Workload):
    """Every token of 200 texts scored, against padded batches through the model."""

    name = "scoring"
    variants = ("512", "64")

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


class ImportTime(Workload):
    """Seconds for ``import genlm_backend`` over starting Python."""

    name = "import_time"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.import_time(repeats)

    def rows(self, found: Found) -> list[Row]:
        return [("`import genlm_backend`", f"{1e3 * found['']['import_s']:.0f} ms", "100 ms")]


class Decoding(Workload):
    """Milliseconds to decode DeepSeek's vocabulary of 129,280 ids."""

    name = "decoding"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return workloads.decoding(repeats)

    def rows(self, found: Found) -> list[Row]:
        ours = median(found[""]["ours_ms"])
        table: list[Row] = [("`decode_vocab`, 129,280 ids", f"{ours:.0f} ms", "300 ms")]
        if "peer_ms" in found[""]:
            theirs = median(found[""]["peer_ms"])
            table.append((f"… over the peer's ({theirs:.0f} ms)", f"{theirs / ours:.1f}×", ""))
        if "limit_ms" in found[""]:
            share = median(found[""]["limit_ms"]) / ours
            table.append(("… share of it that `tokenizer.get_vocab()` takes", f"{share:.0%}", ""))
        return table


class Sampling(Workload):
    """The draws of a step of 20 samples, against the step itself."""

    name = "sampling"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return generation.sampling(repeats)

    def rows(self, found: Found) -> list[Row]:
        step, draws = (median(found[""][key]) for key in ("step_ms", "draws_ms"))
        what = f"20 draws, of the step they belong to ({step:.0f} ms)"
        return [(what, f"{100 * draws / step:.1f}%", "15%")]


class Masks(Workload):
    """A mask under a JSON schema for each of 20 particles, against the step itself."""

    name = "masks"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return generation.masks(repeats)

    def rows(self, found: Found) -> list[Row]:
        step, masks = (median(found[""][key]) for key in ("step_ms", "masks_ms"))
        table: list[Row] = [
            ("a mask under a JSON schema, each of 20", f"{masks / 20:.2f} ms", ""),
            (f"… all 20, of the step they belong to ({step:.0f} ms)", f"{masks / step:.1%}", ""),
        ]
        if "hidden" in found[""]:
            hidden = median(found[""]["hidden"])
            table.append(("… of which within the forward pass", f"{hidden:.0%}", ""))
        return table


class AsyncGlm(Workload):
    """16 tasks through AsyncGLM, against ``model.generate`` task by task."""

    name = "async_glm"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return generation.async_glm(repeats)

    def rows(self, found: Found) -> list[Row]:
        numbers = found[""]
        ratio = median(numbers["theirs_s"]) / median(numbers["ours_s"])
        what = f"AsyncGLM, {numbers['num_tasks']} tasks, over `generate` task by task"
        table: list[Row] = [(what, f"{ratio:.1f}×", "3×")]
        if "limit_s" in numbers:
            share = median(numbers["limit_s"]) / median(numbers["ours_s"])
            table.append((SHARE, f"{share:.0%}", ""))
        return table


class EngineRequests(Workload):
    """Requests of different lengths through an Engine, against padded batches of generate."""

    name = "engine"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return generation.engine(repeats)

    def rows(self, found: Found) -> list[Row]:
        numbers = found[""]
        ours, theirs = median(numbers["ours_s"]), median(numbers["theirs_s"])
        what = f"Engine, {numbers['num_requests']} requests of 4 and 32 tokens, 20 at once"
        waits = f"{median(numbers['first_token_s']):.2f} s"
        table: list[Row] = [
            (what, f"{numbers['num_tokens'] / ours:.0f} tokens/s", ""),
            ("… over `generate` in padded batches of 20", f"{theirs / ours:.1f}×", ""),
            ("… median time to the first token", waits, ""),
        ]
        if "limit_s" in numbers:
            table.append((SHARE, f"{median(numbers['limit_s']) / ours:.0%}", ""))
        return table


class Growth(Workload):
    """How cost grows with particles, context and vocabulary, beside what is ideal."""

    name = "growth"
    table = "growth"
    variants = ("particles", "context", "vocabulary")

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return getattr(growth, variant)(repeats)

    def markdown(self, found: Found) -> str:
        return growth.markdown(found)


class TrieSpeed(Workload):
    """Sums and maxima under every prefix of three vocabularies."""

    name = "trie_speed"
    table = "tries"
    variants = ("SmolLM2", "Tekken", "Tekken + DeepSeek")

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return tries.trie_speed(variant, repeats)

    def markdown(self, found: Found) -> str:
        return tries.markdown_of_speed(found)


class TrieAsync(Workload):
    """A hundred awaits of a trie at once, against one call with all of them."""

    name = "trie_async"
    table = "tries"
    variants = ("SmolLM2", "Tekken")

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return tries.trie_async(variant, repeats)

    def markdown(self, found: Found) -> str:
        return tries.markdown_of_async(found)


class TrieFirstCall(Workload):
    """From a fresh interpreter to the first sums and maxima of Tekken."""

    name = "trie_first_call"
    table = "tries"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return tries.trie_first_call(repeats)

    def markdown(self, found: Found) -> str:
        first = median(found[""]["seconds"])
        return (
            "From a fresh interpreter to the first sums and maxima of Tekken, importing and "
            f"building included and the compiled code on disk: {first:.2f} s."
        )


class TrieDevice(Workload):
    """The parallel trie on a device, beside copying as many bytes."""

    name = "trie_device"
    table = "tries"
    variants = TrieSpeed.variants
    needs = "device"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return tries.trie_device(variant, repeats, device or "cpu")

    def markdown(self, found: Found) -> str:
        return tries.markdown_of_device(found)


class Virtual(Workload):
    """SIS and SMC over vLLM, against ``LLM.generate`` with the same batch."""

    name = "vllm"
    table = "virtual"
    variants = ("vllm_sis", "vllm_plain", "vllm_beside")
    is_repeated = True
    needs = "vllm"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return getattr(virtual, variant)(2)

    def markdown(self, found: Found) -> str:
        return virtual.markdown(found)
