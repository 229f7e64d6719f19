"""An evaluation that the test holds in its hand."""

import threading

import pytest


class Recorder:
    """Doubles numbers; records its batches; can be held, and can fail."""

    def __init__(self):
        self.batches = []
        self.is_held = threading.Event()  # set while an evaluation waits
        self._gate = threading.Event()
        self._gate.set()
        self.error = None

    def __call__(self, queries):
        self.batches.append(list(queries))
        if not self._gate.is_set():
            self.is_held.set()
            assert self._gate.wait(30)
            self.is_held.clear()
        if self.error is not None:
            raise self.error
        return [2 * query for query in queries]

    def hold(self):
        self._gate.clear()

    def let_go(self):
        self._gate.set()


@pytest.fixture
def recorder():
    recorder = Recorder()
    yield recorder
    recorder.let_go()
