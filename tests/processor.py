"""What this machine's processor says of itself."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def has_int8_products():
    """Whether it has instructions that add products of 8 bits without cutting off (VNNI).

    Asked of the system and not of the library, so that tests do not pass over it where it is wrong.
    """
    return not CPUINFO.exists() or "vnni" in CPUINFO.read_text()
