"""Forks: what was asked before is told in them, and what was not works."""

import faulthandler
import gc
import os
import signal
import sys
import threading

import pytest

from genlm_backend import TokenCharacterTrie
from genlm_backend.errors import ForkedError
from genlm_backend.runtime import threads
from tests.histories import say
from tests.histories.holders import MAKE, OfTrie


class Gate:
    """Holds one function of an object until it is let go."""

    def __init__(self, owner, verb):
        self.is_held, self._may_go = threading.Event(), threading.Event()
        original = getattr(owner, verb)

        def held(*args):
            self.is_held.set()
            assert self._may_go.wait(60)
            return original(*args)

        setattr(owner, verb, held)

    def let_go(self):
        self._may_go.set()


class Holding:
    """Another thread, which evaluates and holds locks."""

    def __init__(self, locks):
        self._is_held, self._may_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(locks,))
        self._thread.start()
        assert self._is_held.wait(60)

    def _hold(self, locks):
        with threads.frequent_switches():
            for lock in locks:
                getattr(lock, "here", lock).acquire()
            self._is_held.set()
            assert self._may_go.wait(250)
            for lock in locks:
                getattr(lock, "here", lock).release()

    def let_go(self):
        self._may_go.set()
        self._thread.join()


def in_fork(function):
    """Run a function in a fork that goes on to exit as any program; return how it ended."""
    process = os.fork()
    if process == 0:
        signal.alarm(120)  # ends what hangs
        faulthandler.dump_traceback_later(60)  # and tells where
        function()
        sys.exit(0)
    _, status = os.waitpid(process, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def fork():
    """Fork with a query under way and every lock held by another thread."""
    for make in MAKE.values():
        holder = make()
        expected = holder.ask(3)
        gate = Gate(holder.worked_by, holder.verb)
        found = []
        asking = threading.Thread(target=lambda h=holder, f=found: f.append(h.ask(4)))
        asking.start()
        assert gate.is_held.wait(60)
        holding = Holding(holder.locks)

        def child(holder=holder):
            ways = {**holder.ways(5), **holder.more_ways()}
            for way, function in ways.items():
                with pytest.raises(ForkedError, match="spawn") as raised:
                    say(holder.name, way, "was answered by", function())
                assert isinstance(raised.value, RuntimeError)
            holder.close()
            gc.collect()

        say(holder.name, "ended", in_fork(child))
        holding.let_go()
        gate.let_go()
        asking.join()
        assert found == [pytest.approx(make().ask(4), abs=2e-5)]
        assert holder.ask(3) == pytest.approx(expected, abs=2e-5)
        holder.close()


def fork_fresh():
    """What nobody has asked before the fork works in it, and so does what is made there.

    Other threads hold every lock of the library's own at that moment.
    """
    fresh = [MAKE["mock"](), OfTrie()]
    expected = {name: make().ask(3) for name, make in MAKE.items()}
    trie = TokenCharacterTrie([b"a", b"ab", b"b"])
    sums = trie.weight_sum([1.0, 2.0, 3.0]).tolist()
    interval = sys.getswitchinterval()

    def child():
        assert sys.getswitchinterval() == interval
        assert trie.weight_sum([1.0, 2.0, 3.0]).tolist() == sums
        for holder in [*fresh, *(make() for make in MAKE.values())]:
            assert holder.ask(3) == expected[holder.name], holder.name
            holder.close()

    holding = Holding([threads._numbers, threads._interval._lock, trie._spare._lock])
    say("ended", in_fork(child))
    holding.let_go()
    for holder in fresh:  # and still here, since nobody has asked it here before
        assert holder.ask(3) == expected[holder.name]
