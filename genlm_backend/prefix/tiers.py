"""The memories that keys, values and recurrent states are kept in, by name."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from genlm_backend.checks import Check, one_of

TierName: TypeAlias = Literal["device", "host"]
"""Name of a memory that keys and values are kept in."""

check_tier: Final[Check[TierName | None]] = one_of(None, *get_args(TierName))
"""Check of an argument that names a tier, or none."""
