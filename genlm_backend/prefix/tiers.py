"""The memories that keys, values and running states are kept in: names, and copies between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeAlias, get_args

from genlm_backend.checks import Check, one_of

TierName: TypeAlias = Literal["device", "host"]
"""Name of a memory that keys and values are kept in."""

check_tier: Final[Check[TierName | None]] = one_of(None, *get_args(TierName))
"""Check of an argument that names a tier, or none."""


class Moves(Protocol):
    """Copies of slots or states between the device and the host."""

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        """Copy slots of the device to as many distinct ones of the host."""

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        """Copy slots of the host to as many distinct ones of the device."""
