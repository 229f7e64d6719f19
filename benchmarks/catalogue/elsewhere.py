"""Models that live in other processes."""

from __future__ import annotations

from benchmarks import elsewhere
from benchmarks.workload import Found, Numbers, Row, Workload


class Process(Workload):
    """A model in a process of its own beside one in this process, while Python computes here."""

    name = "process"
    table = "scaling"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return elsewhere.measure()

    def rows(self, found: Found) -> list[Row]:
        return elsewhere.rows(found[""])
