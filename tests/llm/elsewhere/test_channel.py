"""Messages over a socket whose other end takes nothing, or little at a time."""

import random
import socket
import threading

import pytest

from genlm_backend.remote.channel import Channel


class Enough(Exception):
    pass


def enough():
    raise Enough


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    with here, there:
        yield Channel(here, 0.01), Channel(there, 0.01)


def test_interrupted_message_is_completed_before_the_next(ends):
    here, there = ends
    large = random.Random(1).randbytes(5 * 10**6)
    with pytest.raises(Enough):
        here.send(large, enough)
    assert not here.is_clear
    with pytest.raises(Enough):
        here.send(b"next", enough)
    found = []
    thread = threading.Thread(
        target=lambda: found.extend(there.receive(lambda: None) for _ in range(3))
    )
    thread.start()
    here.send(b"last", lambda: None)
    thread.join(60)
    assert found == [large, b"next", b"last"]
    assert here.is_clear
