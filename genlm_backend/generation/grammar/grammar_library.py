"""llguidance: the vocabulary of a model as it takes it, and its messages about a grammar."""

from __future__ import annotations

import re
import weakref
from functools import cache
from typing import Any, Final, final

from genlm_backend.errors import MissingExtraError
from genlm_backend.model.async_lm import AsyncLM

_vocabularies: Final[weakref.WeakKeyDictionary[AsyncLM, Any]] = weakref.WeakKeyDictionary()
"""Vocabularies, each a tenth of a second to make and kept as long as its model is there."""


def vocabulary_of(lm: AsyncLM) -> Any:
    if lm not in _vocabularies:
        library, vocabulary = load_library(), _Vocabulary(lm)
        wrapper = library.TokenizerWrapper(vocabulary)
        _vocabularies[lm] = library.LLTokenizer(wrapper, n_vocab=len(vocabulary.tokens))
    return _vocabularies[lm]


def load_library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError(
            "constraints need llguidance: pip install 'genlm-backend[grammar]'"
        ) from error
    return llguidance


@cache
def executor_of(process_id: int) -> Any:
    """Return the ``LLExecutor`` of this process, whose threads compute masks."""
    return load_library().LLExecutor()


@cache
def is_beginning(grammar: str, text: str) -> bool:
    """Return whether a text begins one of a grammar, by the installed llguidance."""
    token_ids = list(text.encode())
    return _matcher_of_bytes(grammar).validate_tokens(token_ids) == len(token_ids)


def error_of(grammar: str) -> str:
    """Return llguidance's message about a grammar in Lark's syntax; ``""`` if it takes it."""
    matcher = _matcher_of_bytes(grammar)
    return matcher.get_error() if matcher.is_error() else ""


def _matcher_of_bytes(grammar: str) -> Any:
    library = load_library()
    read = library.LLMatcher.grammar_from_lark(grammar)
    # "byte" is a vocabulary of all bytes, which are their ids.
    return library.LLMatcher(library.LLTokenizer("byte"), read, log_level=0)


@final
class _Vocabulary:
    """A model's tokens as llguidance takes them, and one more, which ends a text."""

    bos_token_id = None

    def __init__(self, lm: AsyncLM) -> None:
        # No token of the model ends a text for llguidance, so that its mask covers all of them.
        self.eos_token_id = len(lm.byte_vocab)
        self.special_token_ids = [*sorted(lm.special_ids | lm.undefined_ids), self.eos_token_id]
        self.tokens = [*(token.byte_string for token in lm.byte_vocab), b"<|end of text|>"]
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Split a text greedily; any of the possible splits would do."""
        rest = text.encode() if isinstance(text, str) else text
        found = []
        while rest:
            sizes = range(min(self._longest, len(rest)), 0, -1)
            size = next((n for n in sizes if rest[:n] in self._ids), None)
            if size is None:
                return found
            found.append(self._ids[rest[:size]])
            rest = rest[size:]
        return found


_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ")
_EXCERPT = re.compile(r"(?=[ \d]{4,} \|) {0,3}(\d+) \|")
_COMPILING = "failed to compile JSON schema: "
_REFERENCE = re.compile(r"\n  while processing \S+")  # by a name that is not the caller's
_REGEX = re.compile(
    r"(?:invalid regex .* \(in regex\): )?regex parse error:\n(.*)\nerror: (.*)", re.S
)


def fault_of_generated(message: str) -> str:
    """Return llguidance's message about a grammar that was made of a schema, pattern or choice."""
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
    """Return llguidance's message about a grammar that a caller has written."""
    numbers = [(_EXCERPT.match(line), line) for line in message.rstrip().split("\n")]
    return "\n".join(line for found, line in numbers if not found or int(found[1]) <= num_lines)
