"""Programs of particles: tokens per second, and over those of the others."""

from __future__ import annotations

from benchmarks import behind, clients, workloads
from benchmarks.workload import SHARE, Found, Numbers, Row, Workload, median

SYSTEMS = ("genlm_backend", "generate", "continuous batching", "peer + cache_kv", "peer")
FAST = {"genlm_backend", "peer + cache_kv", "generate"}
PEERS = ("peer + cache_kv", "peer")
LABELS = {
    "peer": "the peer as it comes",
    "peer + cache_kv": "the peer after `cache_kv`",
    "generate": "transformers `generate`, same batch",
    "continuous batching": "transformers' continuous batching",
}


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


class Behind(Workload):
    """20 particles sample 16 tokens each behind a cached prompt of 51, 512 and 4,096 tokens."""

    name = "behind"
    variants = ("genlm_backend", "LLM.generate")
    is_repeated = True
    needs = "vllm"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return behind.ours() if variant == "genlm_backend" else behind.theirs()

    def rows(self, found: Found) -> list[Row]:
        return behind.rows(found)


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
