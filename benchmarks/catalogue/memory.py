"""More context in the same memory, and what is not computed again."""

from __future__ import annotations

from benchmarks import formats, weights
from benchmarks.workload import Found, Numbers, Row, Workload


class Formats(Workload):
    """Answers, capacity and steps by the number format of keys and values."""

    name = "formats"
    table = "formats"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return formats.measure(repeats)

    def markdown(self, found: Found) -> str:
        return formats.markdown(found[""])


class Files(Workload):
    """A long prompt that is computed, loaded from a file, and fetched from the host."""

    name = "files"
    table = "memory"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return formats.measure_files(repeats)

    def rows(self, found: Found) -> list[Row]:
        return formats.file_rows(found[""])


class Weights(Workload):
    """Answers, products and steps by the number format of the weights."""

    name = "weights"
    table = "weights"
    variants = tuple(weights.MODELS)
    is_repeated = True

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return weights.measure(variant, repeats)

    def markdown(self, found: Found) -> str:
        return weights.markdown(found)
