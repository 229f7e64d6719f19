"""What is wrong with a grammar, told without what its writer did not write."""

from __future__ import annotations

import re

_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ")
_EXCERPT = re.compile(r"(?=[ \d]{4,} \|) {0,3}(\d+) \|")
_COMPILING = "failed to compile JSON schema: "
_REFERENCE = re.compile(r"\n  while processing \S+")  # by a name that is not the caller's
_REGEX = re.compile(
    r"(?:invalid regex .* \(in regex\): )?regex parse error:\n(.*)\nerror: (.*)", re.S
)


def fault_of_generated(message: str) -> str:
    """Return llguidance's message about a grammar that was made of a schema, pattern or choice.

    Args:
        message: The message, with the place in the grammar and an excerpt of it at the end.
    """
    place = _PLACE.match(message)
    first = max(1, int(place[1]) - 2) if place else 1  # two lines before the fault are shown
    fault = message.rpartition(f"\n{first:4} | ")[0] or message
    fault = fault[place.end() :] if place else fault
    fault = _REFERENCE.sub("", fault.removeprefix(_COMPILING)).strip()
    if regex := _REGEX.fullmatch(fault):
        shown, error = regex.groups()
        lines = [line.strip() for line in shown.split("\n") if line.strip(" ^~")]
        pattern = " ".join(lines).replace("\\/", "/")
        return f"in the regular expression {pattern}: {error}"
    return fault


def fault_of_own(message: str, num_lines: int) -> str:
    """Return llguidance's message about a grammar that a caller has written.

    Args:
        message: The message, with the place in the grammar and an excerpt of it.
        num_lines: Number of lines that the caller has written; there may be more behind them.
    """
    numbers = [(_EXCERPT.match(line), line) for line in message.rstrip().split("\n")]
    return "\n".join(line for found, line in numbers if not found or int(found[1]) <= num_lines)
