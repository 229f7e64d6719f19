"""A caller's idle OpenMP team does not stand in the worker's way."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from genlm_backend import AsyncTransformer
from genlm_backend.runtime.threads import frequent_switches, release_idle_threads
from tests.llm.conftest import word_tokenizer
from tests.naive import naive_row

WIDE = torch.randn(4_000_000)


def num_threads():
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="only libgomp, on Linux")
@pytest.mark.skipif(torch.get_num_threads() < 2, reason="one thread is no team")
def test_released_openmp_threads_end_and_are_recreated_by_torch():
    def work():
        release_idle_threads()
        alone = num_threads()
        WIDE.exp()
        assert num_threads() > alone
        release_idle_threads()
        assert num_threads() == alone
        assert torch.equal(WIDE.exp(), WIDE.exp())
        release_idle_threads()
        release_idle_threads()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(60)


def test_callers_that_use_torch_themselves_get_the_same_rows(tiny_llama):
    contexts = [[i, i + 1, i + 2] for i in range(40)]
    with AsyncTransformer(tiny_llama, word_tokenizer(), batch_size=3) as lm:

        def ask(context):
            WIDE.exp()
            return lm.next_token_logprobs_sync(context)

        with ThreadPoolExecutor(4) as pool:
            rows = list(pool.map(ask, contexts))
    assert threading.active_count() < 20
    for context, row in zip(contexts, rows, strict=True):
        torch.testing.assert_close(row, naive_row(tiny_llama, context), rtol=0, atol=2e-5)


def test_the_switch_interval_is_short_only_while_a_batch_is_evaluated(tiny_llama):
    before, during = sys.getswitchinterval(), []
    with AsyncTransformer(tiny_llama, word_tokenizer()) as lm:
        hook = tiny_llama.register_forward_pre_hook(
            lambda *_: during.append(sys.getswitchinterval())
        )
        lm.next_token_logprobs_sync([1, 2, 3])
        hook.remove()
        lm._batcher.call(lambda: None)
        assert sys.getswitchinterval() == before
    assert len(during) == 1
    assert during[0] < before / 10


def test_frequent_switches_nest_and_keep_an_interval_set_by_others():
    before = sys.getswitchinterval()
    try:
        with frequent_switches():
            short = sys.getswitchinterval()
            with frequent_switches():
                assert sys.getswitchinterval() == short
            assert sys.getswitchinterval() == short
        assert sys.getswitchinterval() == before
        with pytest.raises(KeyError), frequent_switches():
            raise KeyError
        assert sys.getswitchinterval() == before
        with frequent_switches():
            sys.setswitchinterval(0.003)
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(before)
