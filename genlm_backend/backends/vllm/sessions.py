"""SessionTable: finds the live engine request whose KV cache a context can reuse.

A *session* is a request that stays in the engine after its row has been computed. More tokens
extend it in place; a new session may fork another one's keys and values at any token.
The table only decides; ``SessionPlanner`` carries its decisions out in an engine.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import final

from genlm_backend.queries.context import common_length
from genlm_backend.queries.query import RowQuery


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """The session that one query is computed in, and how much of its context is cached."""

    query: RowQuery
    session: str
    is_new: bool
    num_shared: int = 0
    source: str | None = None

    @property
    def num_extended(self) -> int:
        """Number of tokens that the session already has (0 if new); only later ones are sent."""
        return 0 if self.is_new else self.num_shared


@final
class _Session:
    __slots__ = ("context", "id", "token_ids", "used")

    def __init__(self, session_id: str, context: RowQuery, used: int) -> None:
        self.id = session_id
        self.used = used
        self.hold(context)

    def hold(self, context: RowQuery) -> None:
        self.context = context
        self.token_ids = context.context.packed()  # compared without a loop in Python


@final
class SessionTable:
    """Live sessions by their contexts; the least recently used ones are ended first."""

    def __init__(self, max_sessions: int, prefix: str = "session") -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions must be at least 1, got {max_sessions}")
        self.max_sessions = max_sessions
        self._ids = (f"{prefix}-{number}" for number in itertools.count())
        self._clock = itertools.count()
        self._sessions: dict[str, _Session] = {}
        self._by_context: dict[RowQuery, _Session] = {}
        # Placements of the current part of a batch. No query reuses their tokens before
        # ``commit``, because the engine has not computed them.
        self._round: list[Placement] = []
        self._held: set[str] = set()
        self._extended: set[str] = set()

    def __len__(self) -> int:
        return len(self._sessions) + sum(placement.is_new for placement in self._round)

    @property
    def num_computed(self) -> int:
        """Number of committed sessions, without those that the current part of a batch starts."""
        return len(self._sessions)

    def place(self, query: RowQuery) -> Placement:
        """Plan to extend or fork the session with the longest common prefix, or to start one."""
        best, num_shared = self._longest_prefix(query)
        if best is None:
            placement = Placement(query, next(self._ids), is_new=True)
        elif num_shared == len(best.token_ids) and best.id not in self._extended:
            # Only one query of a part extends a session; later queries fork it at its old end.
            placement = Placement(query, best.id, is_new=False, num_shared=num_shared)
            self._extended.add(best.id)
        else:
            placement = Placement(query, next(self._ids), True, num_shared, best.id)
        if best is not None:
            self._held.add(best.id)
        self._round.append(placement)
        return placement

    def source_of(self, query: RowQuery) -> tuple[str | None, int]:
        """Return the session id and length of the longest common prefix; ``None, 0`` if none."""
        best, num_shared = self._longest_prefix(query)
        return None if best is None else best.id, num_shared

    def withdraw(self, placement: Placement) -> None:
        """Undo the latest placement; ``oldest`` skips the reused session until the part ends."""
        assert self._round[-1] is placement
        self._round.pop()
        if not placement.is_new:
            self._extended.discard(placement.session)

    def oldest(self) -> str | None:
        """Return the id of the least recently used session not reused in this part, or ``None``."""
        idle = (s for s in self._sessions.values() if s.id not in self._held)
        found = min(idle, key=lambda session: session.used, default=None)
        return None if found is None else found.id

    def remove(self, session_id: str) -> int:
        """Remove a session that the engine has ended; return how many tokens it held."""
        session = self._sessions.pop(session_id)
        if self._by_context.get(session.context) is session:
            del self._by_context[session.context]
        return len(session.token_ids)

    def commit(self) -> None:
        """Record that the engine has computed every placement of the part; begin a new part."""
        for placement in self._round:
            if placement.is_new:
                session = _Session(placement.session, placement.query, next(self._clock))
                self._sessions[placement.session] = session
            else:
                session = self._sessions[placement.session]
                if self._by_context.get(session.context) is session:
                    del self._by_context[session.context]
                session.hold(placement.query)
                session.used = next(self._clock)
            self._by_context[placement.query] = session
        for session_id in self._held & self._sessions.keys():
            self._sessions[session_id].used = next(self._clock)
        self._end_round()

    def clear(self) -> list[str]:
        """Remove every session, uncommitted ones too; return their ids."""
        ids = [*self._sessions, *(p.session for p in self._round if p.is_new)]
        self._sessions.clear()
        self._by_context.clear()
        self._end_round()
        return ids

    def _end_round(self) -> None:
        self._round.clear()
        self._held.clear()
        self._extended.clear()

    def _longest_prefix(self, query: RowQuery) -> tuple[_Session | None, int]:
        """Return the session and length of the longest common prefix, without the last token."""
        most = len(query.context) - 1
        pictures = query.context.pictures
        is_kept = most >= (1 if pictures is None else pictures.num_tokens)
        parent = self._by_context.get(query.prefix(most)) if is_kept else None
        if parent is not None:
            return parent, most
        wanted = query.context.packed(0, most)
        best, best_key = None, (0, False)
        for session in self._sessions.values():
            if session.context.adapter != query.adapter:
                continue
            if min(len(wanted), len(session.token_ids)) < best_key[0]:
                continue
            shared = common_length(session.token_ids, wanted)
            # Among equal lengths, prefer a session that ends there and can still be extended.
            key = (shared, shared == len(session.token_ids) and session.id not in self._extended)
            if key > best_key:
                best, best_key = session, key
        return best, best_key[0]
