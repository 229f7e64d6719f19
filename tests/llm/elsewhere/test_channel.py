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


def test_messages_of_all_sizes_come_whole_and_in_order(ends):
    here, there = ends
    generator = random.Random(0)
    messages = [
        generator.randbytes(generator.choice([0, 1, 100, 10**5, 3 * 10**6])) for _ in range(40)
    ]
    found = []

    def receive():
        for _ in messages:
            found.append(there.receive(lambda: None))

    thread = threading.Thread(target=receive)
    thread.start()
    for message in messages:
        here.send(message, lambda: None)
    thread.join(60)
    assert found == messages


def test_what_is_given_up_halfway_goes_before_the_next(ends):
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


def test_waiting_for_a_message_can_be_given_up(ends):
    here, there = ends
    with pytest.raises(Enough):
        there.receive(enough)
    here.send(b"one", enough)
    assert there.receive(enough) == b"one"


def test_a_closed_end_is_noticed():
    here, there = socket.socketpair()
    channel = Channel(here, 0.01)
    there.close()
    with here:
        with pytest.raises(EOFError):
            channel.receive(lambda: None)
        with pytest.raises(OSError, match="pipe"):
            channel.send(b"x" * 10**6, lambda: None)
