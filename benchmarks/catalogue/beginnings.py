"""Beginnings: importing the library and decoding a vocabulary."""

from __future__ import annotations

from benchmarks import workloads
from benchmarks.workload import Found, Numbers, Row, Workload, median


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
