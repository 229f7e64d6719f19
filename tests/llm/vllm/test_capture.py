"""Rows are taken by request, wherever either of vLLM's model runners puts it in the batch."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.llm.vllm import real

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
]


def params(tag):
    from genlm_backend.backends.vllm import capture

    return SimpleNamespace(extra_args=None if tag is None else {capture.TAG: tag})


def taken(tags):
    from genlm_backend.backends.vllm import capture

    logprobs, normalisers = capture.RowExtension.take_genlm_rows(None, tags)
    assert capture.RowCapture.logits == {}
    table = torch.from_numpy(np.frombuffer(logprobs, np.float32).reshape(len(tags), -1).copy())
    return table, torch.tensor(normalisers)


def check(rows, logits):
    logprobs, normalisers = rows
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1))
    torch.testing.assert_close(logprobs + normalisers[:, None], logits.float())


@pytest.fixture(autouse=True)
def first_rank(monkeypatch):
    from genlm_backend.backends.vllm import capture

    monkeypatch.setattr(capture, "get_tensor_model_parallel_rank", lambda: 0)


@pytest.mark.parametrize("seed", range(20))
def test_first_runner_rows_follow_requests_moved_in_the_batch(seed):
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from genlm_backend.backends.vllm.capture import RowCapture

    randomness = random.Random(seed)
    processor, batch, count = RowCapture(None, "cpu", False), [], 0
    for _ in range(30):
        removed = sorted(randomness.sample(range(len(batch)), randomness.randint(0, len(batch))))
        removed = removed[:3]
        for index in removed:
            batch[index] = "gone"
        added, moved = [], []
        for index in [*removed, len(batch)]:
            if randomness.random() < 0.6:
                tag = None if randomness.random() < 0.3 else f"r{count}"
                count += 1
                batch[index : index + 1] = [tag]
                added.append((index, params(tag), None, []))
        while "gone" in batch:  # the last request takes an empty place
            last, empty = len(batch) - 1, batch.index("gone")
            if last != empty:
                batch[empty] = batch[last]
                moved.append((last, empty, MoveDirectionality.UNIDIRECTIONAL))
            batch.pop()
        if len(batch) > 1:
            first, second = randomness.sample(range(len(batch)), 2)
            batch[first], batch[second] = batch[second], batch[first]
            moved.append((first, second, MoveDirectionality.SWAP))
        really_removed = [i for i in removed if i not in [a[0] for a in added]]
        processor.update_state(BatchUpdate(len(batch), really_removed, added, moved))
        logits = torch.randn(len(batch), 7)
        before = logits.clone()
        assert processor.apply(logits) is logits
        assert torch.equal(logits, before)
        logits.zero_()  # as the sampler may
        for index, tag in enumerate(batch):
            if tag is not None:
                assert processor._tags[index] == tag
        tags = [tag for tag in batch if tag is not None]
        rows = [index for index, tag in enumerate(batch) if tag is not None]
        if tags:
            check(taken(tags), before[rows])


def test_second_runner_rows_are_found_by_the_index_mapping():
    pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor", reason="before vLLM 0.31")
    from vllm.v1.worker.gpu.sample.logits_processor.loader import (
        build_custom_logits_processors_params_validator,
    )

    from genlm_backend.backends.vllm.capture import RowCapture

    build_custom_logits_processors_params_validator([RowCapture])(params("x"))
    processor = RowCapture(None, None)
    assert processor.add_request(4, params("a"))
    assert not processor.add_request(2, params(None))
    assert processor.add_request(0, params("b"))
    logits = torch.randn(3, 7)
    context = SimpleNamespace(idx_mapping_np=np.array([2, 0, 4]))
    assert processor.apply(logits, context) is logits
    check(taken(["a", "b"]), logits[[2, 1]])
    assert not processor.add_request(4, params(None))  # the place has another request now
    processor.apply(logits, context)
    check(taken(["b"]), logits[[1]])


def test_taking_rows_gives_none_if_one_of_them_is_missing():
    from genlm_backend.backends.vllm.capture import RowCapture, RowExtension

    processor = RowCapture(None, None)
    processor.add_request(0, params("a"))
    processor.apply(torch.randn(1, 7))
    assert RowExtension.take_genlm_rows(None, ["a", "b"]) is None


def test_rows_captured_in_inference_mode_are_ordinary_tensors():
    from genlm_backend.backends.vllm.capture import RowCapture

    processor, logits = RowCapture(None, None), torch.randn(1, 7)
    processor.add_request(0, params("a"))
    with torch.inference_mode():
        processor.apply(logits * 2)
    (row,) = RowCapture.take_rows(["a"])
    assert not row.logprobs.is_inference()
    check((row.logprobs[None], torch.tensor([row.logsumexp])), logits * 2)
