"""Models of mlx-lm."""

from __future__ import annotations

from benchmarks import mlx
from benchmarks.workload import Found, Numbers, Workload


class Mlx(Workload):
    """SIS and steps over MLX, what is shared read once or copied, and over transformers."""

    name = "mlx"
    table = "mlx"
    variants = mlx.SYSTEMS
    is_repeated = True
    needs = "mlx"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return mlx.measure(variant)

    def markdown(self, found: Found) -> str:
        return mlx.markdown(found)
