"""Interruptions: a Ctrl-C in a forward pass, which is the last one."""

import asyncio
import dataclasses
import signal
import threading

import torch

from genlm_backend import Engine
from tests.histories import late, say
from tests.histories.holders import tiny
from tests.naive import naive_row
from tests.tree_integrity import check_integrity


class Interrupting:
    """Sends SIGINT in the first forward pass, and counts the passes; on a model of transformers."""

    def __init__(self, lm):
        self.num_passes = 0
        self.is_noticed = threading.Event()
        self._lm = lm
        lm.model.register_forward_pre_hook(self._count)
        lm._evaluator.scheduler.cost = dataclasses.replace(
            lm._evaluator.scheduler.cost, max_chunk=8
        )

    def _count(self, *_):
        self.num_passes += 1
        # Python does not notice a signal that comes just before the main thread begins to wait;
        # it does with the next one.
        while not self.is_noticed.wait(3 if self.num_passes > 1 else 0.2):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def __enter__(self):
        self.num_passes = 0
        self.is_noticed.clear()

    def __exit__(self, kind, error, traceback):
        self.is_noticed.set()
        assert kind is KeyboardInterrupt
        if self._lm._batcher.is_closed:
            return True
        self._lm._batcher.call(lambda: None)  # comes behind what was interrupted
        return True


PROMPT = [(7 * i) % 90 + 3 for i in range(80)]


def interrupt():
    """Interrupt each way to block; the last goes through to the end of the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lm = tiny(row_cache_bytes=0)
    interrupting = Interrupting(lm)
    engine = Engine()
    engine.install_model("m", lm, max_length=80)
    ways = {
        "sync": lambda: lm.next_token_logprobs_sync(PROMPT),
        "batch": lambda: lm.batch_next_token_logprobs_sync([PROMPT, PROMPT[::-1]]),
        "await": lambda: asyncio.run(lm.next_token_logprobs(PROMPT)),
        "pin": lambda: lm.cache_kv(PROMPT),
        "warm-up": lambda: engine.start_model("m"),
    }
    for way, function in ways.items():
        lm.clear_cache()
        with interrupting:
            function()
        say(way, "passes", interrupting.num_passes)
    interrupting.is_noticed.set()
    row = lm.next_token_logprobs_sync(PROMPT)
    torch.testing.assert_close(row, naive_row(lm.model, PROMPT), rtol=0, atol=2e-5)
    check_integrity(lm._evaluator.scheduler.tree)

    late.append(lambda: say("exit passes", interrupting.num_passes))
    lm.clear_cache()
    interrupting.__enter__()
    try:
        lm.next_token_logprobs_sync(PROMPT)
    except KeyboardInterrupt:
        interrupting.is_noticed.set()
        raise


def interrupt_a_request():
    """Interrupt a program that waits for an engine's request: exiting ends the evaluation."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lm = tiny(row_cache_bytes=0)
    interrupting = Interrupting(lm)
    engine = Engine()
    engine.install_model("m", lm, warm_up=False)
    engine.start_model("m")
    closing = threading.Thread(target=wait_for_stop, args=(lm, interrupting), daemon=True)
    late.append(lambda: say("exit passes", interrupting.num_passes))
    try:
        engine.start_request_ids("m", PROMPT, max_new_tokens=2).result()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        closing.start()
        raise


def wait_for_stop(lm, interrupting):
    """End the first pass once the interpreter has begun to end the threads."""
    while not lm._batcher._worker.is_stopped:
        pass
    interrupting.is_noticed.set()
