"""Models that live in other processes."""

from __future__ import annotations

from benchmarks import elsewhere, readouts, routing
from benchmarks.workload import Found, Numbers, Row, Workload


class Process(Workload):
    """A model in a process of its own beside one in this process, while Python computes here."""

    name = "process"
    table = "scaling"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return elsewhere.measure()

    def rows(self, found: Found) -> list[Row]:
        return elsewhere.rows(found[""])


class Replicas(Workload):
    """Two replicas of one thread each beside one model of one thread."""

    name = "replicas"
    table = "scaling"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return elsewhere.measure_replicas()

    def rows(self, found: Found) -> list[Row]:
        return elsewhere.replica_rows(found[""])


class Ray(Workload):
    """One replica on a local Ray cluster beside a model in a process of its own."""

    name = "ray"
    table = "scaling"
    takes_peer = False

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return elsewhere.measure_ray()

    def rows(self, found: Found) -> list[Row]:
        return elsewhere.ray_rows(found[""])


class Routing(Workload):
    """Where 10,000 particles go among 64 replicas, simulated."""

    name = "routing"
    table = "routing"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return routing.measure()

    def rows(self, found: Found) -> list[Row]:
        return routing.rows(found[""])


class Readouts(Workload):
    """Top tokens, chosen tokens, entropies and draws of 256 awaits, over whole rows of them."""

    name = "readouts"
    table = "readouts"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return readouts.measure()

    def rows(self, found: Found) -> list[Row]:
        return readouts.rows(found[""])
