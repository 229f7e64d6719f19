"""Models in vLLM."""

from __future__ import annotations

from benchmarks import virtual
from benchmarks.workload import Found, Numbers, Workload


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
