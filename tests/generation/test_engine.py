"""Requests of an engine: each the text it would be alone, from wherever it is asked."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from genlm_backend import AsyncTransformer, MockAsyncLM, load_model_by_name
from genlm_backend.errors import (
    ContextError,
    GenerationConfigError,
    RequestQueueFullError,
    UnknownRequestError,
)
from genlm_backend.generation import (
    Engine,
    GenerationConfig,
    GenerationStatus,
    Piece,
    generate,
    stream,
)
from tests.generation.serving import COLD, alone, same, serve
from tests.llm.conftest import word_tokenizer


def test_concurrent_requests_equal_each_generated_alone(engine, model):
    settings = [
        {},
        {"do_sample": True, "seed": 5, "n": 3},
        {"repetition_penalty": 1.4},
        {"num_beams": 3, "n": 2, "length_penalty": -1.0},
        {"do_sample": True, "top_k": 4, "seed": 9},
    ]
    with AsyncTransformer(model, word_tokenizer()) as lm:
        jobs = [([i, 5, i], {"max_new_tokens": 9, **settings[i % 5]}) for i in range(25)]
        expected = [alone(lm, prompt, **fields) for prompt, fields in jobs]
        lm.clear_cache()
        serve(engine, lm, max_batch=7)
        requests = [engine.start_request_ids("m", prompt, **fields) for prompt, fields in jobs]
        for request, texts in zip(requests, expected, strict=True):
            found = request.result(60)
            assert same(found, texts)
            assert [g.finish_reason for g in found] == [g.finish_reason for g in texts]
            assert [g.score for g in found] == pytest.approx([g.score for g in texts], abs=1e-4)
            assert request.status() is GenerationStatus.FINISHED


@pytest.mark.parametrize(
    "ids",
    [[3, 4], (3, 4), np.array([3, 4]), torch.tensor([3, 4]), torch.tensor([[3, 4]]), range(3, 5)],
    ids=repr,
)
def test_token_ids_of_every_sequence_type_are_accepted(engine, lm, ids):
    serve(engine, lm)
    found = engine.start_request_ids("m", ids, GenerationConfig(max_new_tokens=3)).result()
    assert same(found, alone(lm, [3, 4], max_new_tokens=3))


def test_response_format_is_kept_cut_by_length_or_raises_if_impossible(engine, lm):
    serve(engine, lm)
    fields = {"do_sample": True, "n": 4, "seed": 0, "eos_token_id": 2}
    choice = {"type": "choice", "choice": ["<3><4>", "<8><9><10>"]}
    for text in engine.start_request_ids(
        "m", [1], max_new_tokens=9, response_format=choice, **fields
    ).result():
        assert text.text in ("<3><4>", "<8><9><10>")
        assert text.finish_reason in ("eos", "stop")
    pattern = {"type": "regex", "regex": "(<5>){50}"}
    request = engine.start_request_ids(
        "m", [1], max_new_tokens=9, response_format=pattern, **fields
    )
    assert [g.finish_reason for g in request.result()] == ["length"] * 4
    assert request.status() is GenerationStatus.FINISHED
    nothing = {"type": "regex", "regex": "<5>no such token"}
    request = engine.start_request_ids(
        "m", [1], max_new_tokens=9, response_format=nothing, **fields
    )
    with pytest.raises(
        ValueError,
        match=r"no token is possible after 1 tokens: .* no token of the vocabulary begins",
    ):
        request.result()
    every = engine.start_request_ids(
        "m", [1], max_new_tokens=9, bad_words_ids=[[i] for i in range(96)]
    )
    with pytest.raises(ValueError, match="no token may follow the 1 tokens so far: a constraint"):
        every.result()


def test_queue_yields_every_token_once_with_its_logprobs(engine, lm):
    serve(engine, lm)
    config = GenerationConfig(
        do_sample=True, n=3, seed=1, max_new_tokens=6, logprobs=True, top_logprobs=2
    )
    request = engine.start_request_ids("m", [1, 2], config)
    pieces = list(request.queue)
    texts = request.result()
    for index, text in enumerate(texts):
        own = [piece for piece in pieces if piece.index == index]
        assert [i for piece in own for i in piece.token_ids] == text.token_ids
        assert "".join(piece.text for piece in own) == text.text
        logprobs = [p for piece in own for p in piece.logprobs]
        assert logprobs == [token.logprob for token in text.tokens]
        tops = [top for piece in own for top in piece.top_logprobs]
        assert tops == [token.top_logprobs for token in text.tokens]
        assert [piece.finish_reason for piece in own][-1] == text.finish_reason == "length"
    assert request.queue.get() is request.queue.get_nowait() is None
    assert request.queue.get_with_timeout(1) is None
    assert request.queue.generated_length() == 18
    statistics = request.statistics()
    assert (statistics.num_prompt_tokens, statistics.num_generated_tokens) == (2, 18)
    assert 0 <= statistics.time_in_queue <= statistics.time_to_first_token
    assert statistics.time_to_first_token + 5 * statistics.time_per_token == pytest.approx(
        statistics.time_in_total, abs=0.1
    )


def test_request_status_follows_its_progress(engine, gated):
    serve(engine, gated)
    request = engine.start_request_ids("m", [1], max_new_tokens=3)
    assert request.status() is GenerationStatus.INIT
    assert request.queue.get_nowait() is None
    assert request.queue.get_with_timeout(20) is None
    assert request.statistics().time_to_first_token is None
    with pytest.raises(TimeoutError, match=r"has not ended after 0\.02 s"):
        request.result(0.02)
    with pytest.raises(TimeoutError):
        engine.sync_request(request, 0.02)
    gated.let(1)
    assert len(request.queue.get().token_ids) == 1
    assert request.status() is GenerationStatus.GENERATING
    assert not request.is_done
    gated.let()
    engine.sync_request(request)
    engine.sync_request(request)
    assert request.status() is GenerationStatus.FINISHED
    assert "finished, 3 tokens" in repr(request)


def test_request_reports_number_of_cached_prompt_tokens(engine, model):
    with AsyncTransformer(model, word_tokenizer()) as lm:
        serve(engine, lm)
        first = engine.start_request_ids("m", [1, 2, 3, 4], max_new_tokens=4)
        first.result()
        second = engine.start_request_ids("m", [1, 2, 3, 9], max_new_tokens=4)
        assert second.queue.get().num_cached_tokens == 3
        assert second.statistics().num_cached_tokens == 3
        assert first.statistics().num_cached_tokens == 0


def test_requests_can_be_awaited_and_streamed_from_two_event_loops(engine, lm):
    serve(engine, lm)

    async def main():
        request = engine.start_request_ids("m", [1, 2], max_new_tokens=8)
        pieces = [piece async for piece in request.queue]
        assert [i for piece in pieces for i in piece.token_ids] == (await request)[0].token_ids
        assert await request.queue.aget() is None
        both = await asyncio.gather(request, engine.generate("m", [1, 2], max_new_tokens=8))
        assert same(*both)
        streamed = [piece async for piece in engine.stream("m", [1, 2], max_new_tokens=8)]
        assert [i for piece in streamed for i in piece.token_ids] == both[0][0].token_ids

    asyncio.run(main())
    asyncio.run(main())  # another loop


async def test_engine_pieces_equal_streamed_tokens(engine, lm):
    serve(engine, lm)
    fields = {"max_new_tokens": 6, "logprobs": True, "top_logprobs": 2}

    def read(pieces: list[Piece]):
        assert all(piece.token_id == piece.token_ids[-1] for piece in pieces)
        assert all(piece.logprob == piece.logprobs[-1] for piece in pieces)
        assert [piece.finish_reason for piece in pieces][-1] == "length"
        assert {(piece.index, piece.num_cached_tokens) for piece in pieces} == {(0, 0)}
        return (
            [token for piece in pieces for token in piece.tokens],
            [token_id for piece in pieces for token_id in piece.token_ids],
            [logprob for piece in pieces for logprob in piece.logprobs],
            "".join(piece.text for piece in pieces),
        )

    (text,) = await generate(lm, [1, 2], **fields)
    streamed = [token async for token in stream(lm, [1, 2], **fields)]
    pieces = [piece async for piece in engine.stream("m", [1, 2], **fields)]
    assert read(streamed) == read(pieces)
    assert read(pieces)[0] == text.tokens
    assert [token.top_logprobs for token in streamed] == [
        top for piece in pieces for top in piece.top_logprobs
    ]


async def test_tokens_of_several_texts_carry_the_index_of_their_text(engine, lm):
    serve(engine, lm)
    kinds = [{"do_sample": True, "seed": 1}, {"num_beams": 3}]
    for fields in kinds:
        for texts in (
            await generate(lm, [1], n=2, max_new_tokens=3, **fields),
            await engine.generate("m", [1], n=2, max_new_tokens=3, **fields),
        ):
            numbers = [{token.index for token in text.tokens} for text in texts]
            assert numbers == [{0}, {1}]


async def test_the_event_loop_is_free_while_requests_are_under_way(engine, gated):
    serve(engine, gated)
    task = asyncio.create_task(engine.generate("m", [1], max_new_tokens=4))
    for _ in range(4):
        await asyncio.sleep(0)
        assert not task.done()
        gated.let(1)
    assert len((await task)[0].token_ids) == 4


async def test_requests_from_sixteen_threads_get_their_own_texts(engine, lm):
    serve(engine, lm, max_queue_size=5, max_batch=8)
    prompts = [[i % 90, i // 90, 3] for i in range(400)]
    expected = await asyncio.gather(*(generate(lm, p, max_new_tokens=5) for p in prompts))

    def work(thread):
        for index in range(thread, 400, 16):
            request = engine.start_request_ids("m", prompts[index], max_new_tokens=5)
            pieces = [i for piece in request.queue for i in piece.token_ids]
            assert pieces == expected[index][0].token_ids

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert engine.num_running("m") == engine.num_waiting("m") == 0
    assert lm.statistics().mean_batch_size > 2


# -------------------------------------------------------------------- ending early


@pytest.mark.parametrize(
    ("prompt", "fields", "kind", "message"),
    [
        ([], {}, ContextError, "empty"),
        (torch.empty(0, dtype=torch.int64), {}, ContextError, "empty"),
        (torch.ones(2, 3, dtype=torch.int64), {}, TypeError, "one dimension"),
        ("text", {}, TypeError, "start_request_text"),
        ({"input_ids": [1]}, {}, TypeError, "'input_ids'"),
        ([96], {}, ContextError, "outside the vocabulary"),
        ([1] * 20, {}, ContextError, "leaves no room"),
        ([1] * 21, {}, ContextError, "leaves no room"),
        ([1], {"max_tokens": 5}, ValueError, r"max_tokens is not a field .* mean max_new_tokens"),
        ([1], {"config": {"n": 2}}, ValueError, "config must be a GenerationConfig, got dict"),
        ([1], {"num_beams": 9}, GenerationConfigError, "num_beams=9 exceeds max_batch=4"),
    ],
)
def test_invalid_request_raises_and_spares_others(engine, gated, prompt, fields, kind, message):
    serve(engine, gated, max_length=20, max_batch=4)
    good = engine.start_request_ids("m", [1, 2], max_new_tokens=8)
    with pytest.raises(kind, match=message):
        engine.start_request_ids("m", prompt, **fields)
    assert engine.num_waiting("m") == 0
    assert engine.num_running("m") == 1
    gated.let()
    assert same(good.result(30), alone(gated, [1, 2], max_new_tokens=8))


def test_request_of_another_engine_raises_unknown_request_error(engine, lm):
    serve(engine, lm)
    request = engine.start_request_ids("m", [1], max_new_tokens=1)
    with Engine() as other:
        for use in (other.stop_request, other.release_request, other.sync_request):
            for wrong in (request, "request"):
                with pytest.raises(UnknownRequestError, match="is not a request of this engine"):
                    use(wrong)


def test_text_or_chat_that_cannot_be_encoded_raises_context_error(engine, lm):
    class Bare(MockAsyncLM):
        def __init__(self):
            super().__init__(word_tokenizer())
            self.tokenizer = object()

    serve(engine, lm)
    with Bare() as bare:
        engine.install_model("bare", bare, **COLD)
        engine.start_model("bare")
        with pytest.raises(ContextError, match="cannot encode text: pass token ids"):
            engine.start_request_text("bare", "hello")
    chat = [{"role": "user", "content": "hello"}]
    with pytest.raises(ContextError, match="has no chat template"):
        engine.start_request_text("m", chat)
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}]
    with pytest.raises(ContextError, match=r"images .*; sounds and other parts"):
        engine.start_request_text("m", image)
    with pytest.raises(ContextError, match="empty"):
        engine.start_request_text("m", "")


def test_list_of_texts_starts_one_request_each_or_none(engine, lm):
    serve(engine, lm)
    requests = engine.start_request_text("m", ["<3>", "<4>"], max_new_tokens=3)
    assert [request.prompt_token_ids for request in requests] == [(3,), (4,)]
    assert same(requests[1].result(), alone(lm, [4], max_new_tokens=3))
    before = lm.statistics().num_awaits
    with pytest.raises(ContextError, match="empty"):
        engine.start_request_text("m", ["<3>", ""], max_new_tokens=3)
    assert lm.statistics().num_awaits == before
    assert engine.start_request_text("m", []) == []


def test_list_of_texts_that_exceeds_the_queue_starts_none(engine, gated):
    serve(engine, gated, max_batch=1, max_queue_size=1)
    with pytest.raises(RequestQueueFullError):
        engine.start_request_text("m", ["<3>", "<4>", "<5>"], timeout=0, max_new_tokens=3)
    assert engine.num_running("m") == engine.num_waiting("m") == 0
    gated.let()
    (request,) = engine.start_request_text("m", ["<3>"], max_new_tokens=3)
    assert same(request.result(30), alone(gated, [3], max_new_tokens=3))


@pytest.mark.real
async def test_generate_and_stream_accept_text_chat_or_token_ids(engine):
    with load_model_by_name("smollm2", backend="mock") as lm:
        serve(engine, lm)
        chat = [{"role": "user", "content": "One colour."}]
        template = lm.tokenizer.apply_chat_template
        written = template(chat, tokenize=False, add_generation_prompt=True)
        cases = [
            ("One, two,", lm.tokenizer.encode("One, two,")),
            (chat, lm.tokenizer.encode(written, add_special_tokens=False)),
            ([5, 6], [5, 6]),
            (torch.tensor([[5, 6]]), [5, 6]),
        ]
        for prompt, ids in cases:
            expected = await generate(lm, ids, max_new_tokens=4)
            assert same(await engine.generate("m", prompt, max_new_tokens=4), expected)
            pieces = [p.text async for p in engine.stream("m", prompt, max_new_tokens=4)]
            assert "".join(pieces) == expected[0].text
        for wrong in (lm.tokenizer("One"), {"input_ids": [1]}):
            with pytest.raises(TypeError, match="pass its 'input_ids'"):
                await engine.generate("m", wrong, max_new_tokens=4)
        with pytest.raises(TypeError, match="start_request_text"):
            engine.start_request_ids("m", "One")
