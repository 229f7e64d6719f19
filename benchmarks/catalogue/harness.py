"""lm-evaluation-harness: multiple choice behind examples, and over the harness's own model."""

from __future__ import annotations

from benchmarks import harness
from benchmarks.workload import Found, Numbers, Row, Workload, median


class Harness(Workload):
    """Multiple choice of lm-evaluation-harness, on its model ``hf`` as well."""

    name = "lm_eval"
    variants = ("genlm", *(f"hf, batches of {size}" for size in harness.BATCH_SIZES))
    needs = "lm-eval"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return harness.harness(variant, repeats)

    def rows(self, found: Found) -> list[Row]:
        own, table = found["genlm"], list[Row]()
        for kind, about in harness.KINDS.items():
            took = median(own[f"{kind}_s"])
            what = f"lm-evaluation-harness, choices of {about}, requests per second"
            table.append((what, f"{own['num_requests'] / took:.1f}", ""))
            theirs = {
                name.removeprefix("hf, "): median(numbers[f"{kind}_s"])
                for name, numbers in found.items()
                if name != "genlm"
            }
            if theirs:
                best = min(theirs, key=lambda name: theirs[name])
                rate = own["num_requests"] / theirs[best]
                label = f"… over its own model `hf`, {best}, which are its fastest ({rate:.1f})"
                table.append((label, f"{theirs[best] / took:.1f}×", "1.5×"))
        return table
