"""llguidance: its tokenizer for a model's vocabulary, and its error messages about grammars."""

from __future__ import annotations

import re
import weakref
from functools import cache
from typing import Any, Final, final

from genlm_backend.errors import MissingExtraError
from genlm_backend.model.async_lm import AsyncLM

_vocabularies: Final[weakref.WeakKeyDictionary[AsyncLM, Any]] = weakref.WeakKeyDictionary()
"""Cached ``LLTokenizer`` of each model, since building one takes a tenth of a second."""


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
    """Return a process's ``LLExecutor``, threads that compute masks; a fork needs its own."""
    return load_library().LLExecutor()


@cache
def is_beginning(grammar: str, text: str) -> bool:
    """Return whether the installed llguidance accepts a text as a prefix of a grammar's texts."""
    token_ids = list(text.encode())
    return _matcher_of_bytes(grammar).validate_tokens(token_ids) == len(token_ids)


def error_of(grammar: str) -> str:
    """Return llguidance's error message about a Lark grammar; ``""`` if there is none."""
    matcher = _matcher_of_bytes(grammar)
    return matcher.get_error() if matcher.is_error() else ""


def _matcher_of_bytes(grammar: str) -> Any:
    library = load_library()
    read = library.LLMatcher.grammar_from_lark(grammar)
    # In llguidance's "byte" vocabulary, each byte is its own token id.
    return library.LLMatcher(library.LLTokenizer("byte"), read, log_level=0)


@final
class _Vocabulary:
    """A model's tokens in llguidance's format, plus one token that ends a text."""

    bos_token_id = None

    def __init__(self, lm: AsyncLM) -> None:
        # llguidance's EOS is the added token, so the model's EOS tokens are like others in masks.
        self.eos_token_id = len(lm.byte_vocab)
        self.special_token_ids = [*sorted(lm.special_ids | lm.undefined_ids), self.eos_token_id]
        self.tokens = [*(token.byte_string for token in lm.byte_vocab), b"<|end of text|>"]
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize a text greedily until no token matches; llguidance accepts any tokenisation."""
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
_REFERENCE = re.compile(r"\n  while processing \S+")  # names a generated rule, so it is cut
_REGEX = re.compile(
    r"(?:invalid regex .* \(in regex\): )?regex parse error:\n(.*)\nerror: (.*)", re.S
)


def fault_of_generated(message: str) -> str:
    """Return llguidance's message about a generated grammar, without its excerpt of the grammar."""
    place = _PLACE.match(message)
    first = max(1, int(place[1]) - 2) if place else 1  # an excerpt begins two lines earlier
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
    """Return llguidance's message without its excerpts of lines after line ``num_lines``."""
    numbers = [(_EXCERPT.match(line), line) for line in message.rstrip().split("\n")]
    return "\n".join(line for found, line in numbers if not found or int(found[1]) <= num_lines)
