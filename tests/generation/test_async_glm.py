"""Tasks from threads: each gets its own result, once, and nobody waits for ever."""

import asyncio
import copy
import queue
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import torch
import transformers

from genlm_backend import AsyncTransformer, MockAsyncLM
from genlm_backend.errors import ContextError, GenerationConfigError, ModelStateError
from genlm_backend.generation import AsyncGLM, GenerationConfig, generate
from tests.llm import families
from tests.llm.conftest import fresh_row, word_tokenizer
from tests.llm.hooked import HookedMock

GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": [7, 30], "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return families.make("llama")


@pytest.fixture
def mock():
    with MockAsyncLM(word_tokenizer(), row_cache_bytes=0) as lm:
        yield lm


class SlowLM(HookedMock):
    """A mock whose batches wait until they may go on."""

    def __init__(self):
        super().__init__(word_tokenizer(), row_cache_bytes=0)
        self.gate = threading.Event()

    def evaluate(self, queries):
        assert self.gate.wait(60)
        if any(query.token_ids[0] == 13 for query in queries):
            raise ZeroDivisionError("thirteen")
        return super().evaluate(queries)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tokenizer", [None, word_tokenizer()], ids=["bare", "tokenizer"])
def test_results_are_those_of_generate(model, tokenizer):
    batches = [
        torch.tensor([1, 2, 3]),
        torch.tensor([[4, 5, 6], [7, 8, 9]]),
        {
            "input_ids": torch.tensor([[0, 0, 5], [1, 2, 3]]),
            "attention_mask": [[0, 0, 1], [1, 1, 1]],
        },
    ]
    with AsyncGLM(model, tokenizer, generation_kwargs=GREEDY) as glm:
        ids = [glm.submit(batch) for batch in batches]
        results = [glm.get_result(task_id, timeout=60) for task_id in ids]
    for batch, result in zip(batches, results, strict=True):
        rows = batch["input_ids"] if isinstance(batch, dict) else torch.atleast_2d(batch)
        mask = torch.ones_like(rows)
        if isinstance(batch, dict):
            mask = torch.tensor(batch["attention_mask"])
        theirs = model.generate(rows, attention_mask=mask, **GREEDY)
        assert torch.equal(result, theirs)


@pytest.mark.filterwarnings("ignore")
def test_beams_are_those_of_generate(model):
    kwargs = {
        **GREEDY,
        "pad_token_id": 1,
        "num_beams": 3,
        "num_return_sequences": 2,
        "length_penalty": -1.0,
    }
    with AsyncGLM(model, generation_kwargs=kwargs) as glm:
        result = glm.get_result(glm.submit([[4, 5, 6], [7, 8, 9]]), timeout=60)
    rows = torch.tensor([[4, 5, 6], [7, 8, 9]])
    assert torch.equal(result, model.generate(rows, attention_mask=torch.ones_like(rows), **kwargs))


def test_a_task_that_does_not_fit_into_memory_says_so(model):
    with AsyncTransformer(model, word_tokenizer(), kv_cache_bytes=10_000) as lm:
        assert lm.kv_capacity is not None
        length = lm.kv_capacity
        with AsyncGLM(lm) as glm:
            long = glm.submit([1] * 5, {"max_new_tokens": length})
            short = glm.submit([2] * 5, {"max_new_tokens": 3})
            assert glm.get_result(short, 60).shape == (1, 8)
            with pytest.raises(RuntimeError, match="do not fit into the model's memory"):
                glm.get_result(long, 60)


def test_rows_padded_on_the_right_lose_their_padding(model):
    inputs = {"input_ids": [[5, 6, 0, 0], [1, 2, 3, 4]], "attention_mask": [[1, 1, 0, 0], [1] * 4]}
    with AsyncGLM(model, generation_kwargs=GREEDY) as glm:
        result = glm.get_result(glm.submit(inputs), timeout=60)
        alone = glm.get_result(glm.submit([5, 6]), timeout=60)
    ours = [i for i in result[0, 4:].tolist() if i]
    assert result[0, :4].tolist() == [5, 6, 0, 0]
    assert ours == [i for i in alone[0, 2:].tolist() if i]


LENGTHS = [
    {"max_length": 11},
    {"max_length": 9, "min_length": 9},
    {"max_new_tokens": 5, "max_length": 50, "min_length": 10},
    {"max_length": 12, "min_new_tokens": 3},
    {"max_length": 12, "min_length": 11, "min_new_tokens": 0},
    {"max_new_tokens": 4, "min_length": 40},
    {"max_length": 10, "min_new_tokens": 40},
    {},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_padding_counts_for_lengths_as_in_generate(model, lengths, beams):
    """Half of the vocabulary ends a text, so that the least lengths matter too."""
    kwargs = {"eos_token_id": list(range(0, 96, 2)), "pad_token_id": 0, "num_beams": beams}
    rows = torch.tensor([[0, 0, 0, 0, 5], [0, 0, 7, 8, 9], [1, 2, 3, 4, 5], [0, 9, 9, 9, 2]])
    mask = (torch.arange(5) >= torch.tensor([4, 2, 0, 1])[:, None]).long()
    inputs = {"input_ids": rows, "attention_mask": mask}
    with AsyncGLM(model, generation_kwargs={**kwargs, **lengths}) as glm:
        result = glm.get_result(glm.submit(inputs), timeout=60)
    assert torch.equal(result, model.generate(**inputs, **kwargs, **lengths))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_padding_on_the_right_counts_for_lengths_too(model, lengths):
    """As many columns as in generate; the ids are those of the row without its padding."""
    rows = torch.tensor([[5, 6, 0, 0], [1, 2, 3, 4]])
    inputs = {"input_ids": rows, "attention_mask": (rows > 0).long()}
    kwargs = {"eos_token_id": None, "pad_token_id": 0}
    with AsyncGLM(model, generation_kwargs={**kwargs, **lengths}) as glm:
        result = glm.get_result(glm.submit(inputs), timeout=60)
    theirs = model.generate(**inputs, **kwargs, **lengths)
    assert result.shape == theirs.shape
    assert torch.equal(result[1], theirs[1])
    alone = rows[:1, :2]
    expected = model.generate(
        alone, attention_mask=torch.ones_like(alone), max_new_tokens=result.shape[1] - 4, **kwargs
    )
    assert torch.equal(result[0, 4:], expected[0, 2:])


def test_a_padded_row_that_fills_the_length_leaves_no_room(model):
    inputs = {"input_ids": [[0, 0, 0, 5]], "attention_mask": [[0, 0, 0, 1]]}
    with AsyncGLM(model) as glm, pytest.raises(ContextError, match=r"4 tokens wide .* no room"):
        glm.submit(inputs, {"max_length": 4})


def test_a_least_length_of_a_task_goes_before_the_constructors_own(model):
    """The constructor's would be that of new tokens, which goes before the other in generate."""
    eos = list(range(0, 96, 2))
    kwargs = {"eos_token_id": eos, "max_new_tokens": 9, "pad_token_id": 0, "min_new_tokens": 1}
    with AsyncGLM(model, generation_kwargs=kwargs) as glm:
        result = glm.get_result(glm.submit([5, 6, 7], {"min_length": 11}), timeout=60)
    assert result.shape[1] >= 11


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kwargs", [{}, {"eos_token_id": None}, {"eos_token_id": [7, 30]}], ids=str)
@pytest.mark.parametrize("own", [None, 9, [*range(9, 96, 7)]], ids=str)
@pytest.mark.parametrize("pad", [None, 3])
def test_what_ends_a_text_is_what_ends_it_in_generate(model, kwargs, own, pad):
    """And not what the tokenizer says; as is what stands behind the end."""
    with torch.no_grad():
        whole = model.generate(torch.tensor([[1, 2]]), max_new_tokens=8, eos_token_id=None)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(), eos_token=f"<{whole[0, 4]}>", pad_token="<8>"
    )
    model = copy.deepcopy(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=own, pad_token_id=pad)
    rows = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 9], [11, 30]])
    kwargs = {"max_new_tokens": 30, "repetition_penalty": 1.3, **kwargs}
    with AsyncGLM(model, tokenizer, generation_kwargs=kwargs) as glm:
        result = glm.get_result(glm.submit(rows), timeout=60)
    assert torch.equal(result, model.generate(rows, attention_mask=torch.ones_like(rows), **kwargs))


def test_a_model_that_has_no_configuration_ends_where_its_tokenizer_says():
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(), eos_token="<7>", pad_token="<8>"
    )
    with MockAsyncLM(tokenizer) as lm, AsyncGLM(lm) as glm:
        kwargs = {"max_new_tokens": 400, "do_sample": True, "seed": 0}
        ended = glm.get_result(glm.submit([[1], [2], [3], [4]], kwargs), timeout=60)
        assert ended.shape[1] < 401
        for row in ended.tolist():
            assert set(row[row.index(7) + 1 :]) <= {8}
        kwargs["eos_token_id"] = None
        assert glm.get_result(glm.submit([1], kwargs), timeout=60).shape[1] == 401


def test_a_model_whose_checkpoint_has_keys_of_its_own(model):
    own = copy.deepcopy(model)
    own.generation_config = transformers.GenerationConfig(
        chat_format="chatml", max_window_size=6144, trust_remote_code=True, typical_p=1.0,
        cache_implementation="static", disable_compile=True, num_assistant_tokens=5,
        prefill_chunk_size=8, guidance_scale=1.0, num_beam_groups=1, max_new_tokens=3,
    )  # fmt: skip
    with AsyncGLM(own) as glm:
        assert glm.get_result(glm.submit([1, 2]), timeout=60).shape == (1, 5)


async def test_four_hundred_tasks_from_sixteen_threads(mock):
    prompts = [[i % 90, i // 90, 3] for i in range(400)]
    config = GenerationConfig(max_new_tokens=6)
    alone = await asyncio.gather(*(generate(mock, prompt, config) for prompt in prompts))
    expected = [found[0].token_ids for found in alone]
    kwargs = {"max_new_tokens": 6}
    with AsyncGLM(mock, max_queue_size=10, generation_kwargs=kwargs) as glm:

        def work(thread):
            results = {}
            for index in range(thread, 400, 16):
                task_id = glm.submit(prompts[index])
                results[index] = glm.get_result(task_id, timeout=60)
            return results

        with ThreadPoolExecutor(16) as pool:
            for results in pool.map(work, range(16)):
                for index, result in results.items():
                    assert result.tolist() == [prompts[index] + expected[index]]
    assert mock.statistics().mean_batch_size > 3


def test_samples_are_drawn_from_where_generate_draws_them(model):
    """Nobody names top_k: transformers keeps 50 tokens then, of 96."""
    draws = {"do_sample": True, "max_new_tokens": 1, "temperature": 3.0, "eos_token_id": 95}
    kwargs = {**draws, "num_return_sequences": 400, "seed": 0}
    with AsyncGLM(model, generation_kwargs=kwargs) as glm:
        result = glm.get_result(glm.submit([1, 2, 3]), 60)
    allowed = fresh_row(model, [1, 2, 3]).topk(50).indices.tolist()
    seen = set(result[:, 3].tolist())
    assert seen <= set(allowed)
    assert len(seen) > 25


def test_the_models_own_defaults_hold_once_it_samples(model):
    own = copy.deepcopy(model)
    own.generation_config = transformers.GenerationConfig(top_k=1, eos_token_id=95)
    with AsyncGLM(own, generation_kwargs={"do_sample": True, "max_new_tokens": 5}) as glm:
        sampled = glm.get_result(glm.submit([1, 2]), 60)
        greedy = glm.get_result(glm.submit([1, 2], {"do_sample": False}), 60)
    assert torch.equal(sampled, greedy)


def test_several_samples_with_seeds(mock):
    kwargs = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 5, "seed": 1}
    with AsyncGLM(mock, generation_kwargs=kwargs) as glm:
        first, second = (glm.get_result(glm.submit([[1, 2], [3, 4]]), 60) for _ in range(2))
    assert first.shape == (6, 7)
    assert torch.equal(first, second)
    assert len({tuple(row) for row in first[:3].tolist()}) == 3


def test_a_full_queue_blocks_times_out_and_goes_on():
    lm = SlowLM()
    kwargs = {"max_new_tokens": 2}
    with AsyncGLM(lm, max_queue_size=2, generation_kwargs=kwargs, max_running=1) as glm:
        ids = [glm.submit([i]) for i in range(3)]
        assert glm.queue_size() == 2
        begin = time.monotonic()
        with pytest.raises(queue.Full):
            glm.submit([9], timeout=0.05)
        assert time.monotonic() - begin >= 0.05
        with pytest.raises(TimeoutError):
            glm.get_result(ids[0], timeout=0.01)
        assert not glm.is_ready(ids[0])
        threading.Timer(0.05, lm.gate.set).start()
        ids.append(glm.submit([9]))  # waits for a place
        assert [glm.get_result(i, 60)[0, 0].item() for i in ids] == [0, 1, 2, 9]
        with pytest.raises(KeyError):
            glm.get_result(ids[0])
        with pytest.raises(KeyError):
            glm.is_ready(12345)
    lm.close()


def test_a_failing_task_gives_its_own_exception_and_the_others_their_results():
    lm = SlowLM()
    lm.gate.set()
    with AsyncGLM(lm, generation_kwargs={"max_new_tokens": 2}) as glm:
        bad = glm.submit([13])
        with pytest.raises(ZeroDivisionError, match="thirteen"):
            glm.get_result(bad, 60)
        good = glm.submit([1])
        assert glm.get_result(good, 60).shape == (1, 3)
        with pytest.raises(KeyError):
            glm.get_result(bad)
    lm.close()


def test_tasks_may_be_submitted_before_the_start_and_shutdown_completes_them(mock):
    glm = AsyncGLM(mock, generation_kwargs={"max_new_tokens": 3})
    task_id = glm.submit([1, 2])
    assert glm.queue_size() == 1
    glm.start()
    glm.start()
    glm.shutdown(wait=True)
    assert glm.get_result(task_id).shape == (1, 5)
    glm.shutdown()
    for use in (lambda: glm.submit([1]), glm.start):
        with pytest.raises(RuntimeError, match="shut down"):
            use()


def test_waiting_before_the_start_says_so_at_once_and_the_task_stays(mock):
    glm = AsyncGLM(mock, max_queue_size=1, generation_kwargs=GREEDY)
    task = glm.submit([[5, 6]])
    for wait in (
        lambda: glm.get_result(task),
        lambda: glm.get_result(task, timeout=1000),
        lambda: glm.submit([[5, 6]]),  # the queue is full, and nobody works at it
        lambda: glm.submit([[5, 6]], timeout=1000),
    ):
        with pytest.raises(ModelStateError, match=r"call start\(\), or use it in a with") as raised:
            wait()
        assert isinstance(raised.value, RuntimeError)
    with pytest.raises(queue.Full):
        glm.submit([[5, 6]], timeout=0)
    assert not glm.is_ready(task)
    with glm:
        expected = asyncio.run(generate(mock, [5, 6], max_new_tokens=8, eos_token_id=[7, 30]))
        assert glm.get_result(task)[0].tolist()[2:] == expected[0].token_ids


def test_waiting_for_a_task_that_was_never_begun_is_told_by_shutdown(mock):
    glm = AsyncGLM(mock, generation_kwargs=GREEDY)
    task = glm.submit([[5, 6]])
    glm.shutdown()
    with pytest.raises(CancelledError):
        glm.get_result(task)


def test_a_task_waits_as_one_however_many_rows_it_has():
    lm = SlowLM()
    kwargs = {"max_new_tokens": 2}
    with AsyncGLM(lm, max_queue_size=2, generation_kwargs=kwargs, max_running=2) as glm:
        ids = [glm.submit([[i], [i + 1], [i + 2]]) for i in (20, 30, 40)]
        assert glm.queue_size() == 2
        with pytest.raises(queue.Full, match="2 tasks are waiting already"):
            glm.submit([[1], [2], [3]], timeout=0)
        assert glm.queue_size() == 2
        lm.gate.set()
        for first, task_id in zip((20, 30, 40), ids, strict=True):
            assert glm.get_result(task_id, 60)[:, 0].tolist() == [first, first + 1, first + 2]
    lm.close()


def test_a_row_that_fails_ends_the_others_of_its_task():
    class Failing(SlowLM):
        def evaluate(self, queries):
            if any(query.token_ids[0] == 7 for query in queries):
                raise ZeroDivisionError("seven")
            return super().evaluate(queries)

    lm = Failing()
    with AsyncGLM(lm, generation_kwargs={"max_new_tokens": 2}, max_running=1) as glm:
        first = glm.submit([1])
        bad = glm.submit([[7], [8]])
        assert (glm.queue_size(), glm.is_ready(bad)) == (1, False)
        lm.gate.set()
        with pytest.raises(ZeroDivisionError, match="seven"):
            glm.get_result(bad, 60)
        assert glm.get_result(first, 60).shape == (1, 3)
        assert glm.queue_size() == 0
    lm.close()


def test_whoever_waits_for_room_is_told_by_shutdown_and_the_others_are_completed():
    lm = SlowLM()
    glm = AsyncGLM(lm, max_queue_size=1, generation_kwargs={"max_new_tokens": 2}, max_running=1)
    ids, told = [], threading.Event()

    def submit():
        with pytest.raises(ModelStateError, match="has been shut down"):
            glm.submit([5])
        told.set()
        lm.gate.set()

    glm.start()
    ids = [glm.submit([i]) for i in (1, 2)]
    blocked = threading.Thread(target=submit)
    blocked.start()
    while not glm._served._room._waiters:
        time.sleep(0.001)
    glm.shutdown()  # which waits for those that wait for the gate
    assert told.is_set()
    blocked.join(30)
    assert [glm.get_result(task_id)[0, 0].item() for task_id in ids] == [1, 2]
    lm.close()


def test_shutdown_without_waiting_cancels_what_is_not_complete():
    lm = SlowLM()
    glm = AsyncGLM(lm, generation_kwargs={"max_new_tokens": 2}, max_running=1)
    glm.start()
    ids = [glm.submit([i]) for i in range(3)]

    def wait():
        with pytest.raises(CancelledError):
            glm.get_result(ids[2])

    waiting = threading.Thread(target=wait)
    waiting.start()
    threading.Timer(0.1, lm.gate.set).start()
    glm.shutdown(wait=False)
    waiting.join(30)
    assert not waiting.is_alive()
    for task_id in ids[:2]:
        with pytest.raises(CancelledError):
            glm.get_result(task_id, 30)
    assert not [t for t in threading.enumerate() if t.name == "genlm-engine"]
    lm.close()


@pytest.mark.parametrize(
    ("inputs", "kwargs", "kind", "message"),
    [
        ([], {}, ContextError, "empty"),
        ([[]], {}, ContextError, "empty"),
        ([1.5], {}, ContextError, "must be integers"),
        ([[[1]]], {}, ContextError, "shape"),
        ([96], {}, ContextError, "96"),
        ({"ids": [1]}, {}, ContextError, "input_ids"),
        ({"input_ids": [[1]], "pixel_values": [0.5]}, {}, ContextError, "read 'pixel_values'"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, {}, ContextError, "attention_mask"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, {}, ContextError, "empty"),
        ([1], {"penalty_alpha": 0.6}, GenerationConfigError, "penalty_alpha is not honoured"),
        ([1], {"num_beams": 2, "do_sample": True}, GenerationConfigError, "num_beams"),
        ([1], {"num_beams": 21}, GenerationConfigError, "more than max_running=20"),
        ([1], {"num_return_sequences": 2}, GenerationConfigError, "n must be 1"),
        ([1], {"temperature": -1, "do_sample": True}, GenerationConfigError, "temperature"),
        ([1, 2], {"max_length": 2}, ContextError, "no room"),
    ],
)
def test_mistakes_are_told_before_anything_is_queued(mock, inputs, kwargs, kind, message):
    with AsyncGLM(mock, generation_kwargs={"max_new_tokens": 3}) as glm:
        with pytest.raises(kind, match=message):
            glm.submit(inputs, kwargs)
        assert glm.queue_size() == 0
        assert glm.get_result(glm.submit([1]), 30).shape == (1, 4)
    with pytest.raises(GenerationConfigError, match="penalty_alpha"):
        AsyncGLM(mock, generation_kwargs={"penalty_alpha": 0.6})
    for name in ("max_queue_size", "max_running"):
        with pytest.raises(GenerationConfigError, match=name):
            AsyncGLM(mock, **{name: 0})
