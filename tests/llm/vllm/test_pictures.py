"""Contexts that begin with pictures, on vLLM: rows are those of the plain model."""

import asyncio
import copy
import functools
import pickle
import random
import tempfile

import pytest
import torch

from genlm_backend import AsyncTransformer, AsyncVirtualLM, MultiMediaInfo, generate
from genlm_backend.errors import PictureError
from tests.llm.picture_families import inputs, make, marker, picture
from tests.llm.vllm import fake, real

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

TOLERANCE = 2e-5


@functools.cache
def family():
    return make("wide")


@pytest.fixture(
    scope="module",
    params=["0", pytest.param("1", marks=pytest.mark.slow)],
    ids=["here", "in a process of its own"],
)
def lm(request):
    pytest.importorskip("vllm")
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine

    real.close_tiny_engine()
    folder = tempfile.mkdtemp()
    for part in family():
        part.save_pretrained(folder)
    options = {**real.TINY_OPTIONS, "skip_tokenizer_init": False, "max_model_len": 200}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", request.param)
        engine = VLLMEngine.load(folder, options)
    with AsyncVirtualLM(engine, row_cache_bytes=0) as lm:
        yield lm


@torch.no_grad()
def plain_row(text, images, more=()):
    model, processor = family()
    made = inputs(model, processor, text, images)
    ids = made["input_ids"][0].tolist()
    made |= {"input_ids": torch.tensor([[*ids, *more]])}
    made["attention_mask"] = torch.ones_like(made["input_ids"])
    return model(**made).logits[0, -1].float().log_softmax(-1)


def prompt_of(numbers, before="ab ", after=" ef"):
    text = before + " cd ".join([marker("smolvlm")] * len(numbers)) + after
    return text, [picture(number) for number in numbers]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.vllm
def test_rows_of_picture_forks_in_mixed_batches_match_the_plain_model(lm):
    generator = random.Random(0)
    prompts = [prompt_of(numbers) for numbers in ([1], [2], [1, 2], [2, 1])]
    prompts.append(prompt_of([1], before="", after=""))  # nothing around it
    grown = [(lm.context(text, images=images), (text, images), []) for text, images in prompts]
    for _ in range(3):
        texts = [generator.choices(range(3, 90), k=generator.randint(1, 9)) for _ in range(3)]
        texts.append(lm.tokenizer.encode("ab "))  # which pictures go on from
        rows = lm.batch_next_token_logprobs_sync([*texts, *(c for c, *_ in grown)])
        for row, (_, prompt, more) in zip(rows[len(texts) :], grown, strict=True):
            close(row, plain_row(*prompt, more))
        model = family()[0]
        for row, text in zip(rows, texts, strict=False):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([text])).logits[0, -1]
            close(row, logits.log_softmax(-1))
        forks = [generator.choice(grown) for _ in range(7)]
        new = [generator.choices(range(3, 90), k=generator.randint(1, 3)) for _ in forks]
        grown = [(c + n, p, [*m, *n]) for (c, p, m), n in zip(forks, new, strict=True)]


@pytest.mark.vllm
async def test_samples_of_pictures_are_unchanged_by_clear_cache(lm):
    lm.clear_cache()
    text, images = prompt_of([1, 2])
    context = lm.context(text, images=images)
    alone = await lm.batch_sample([context] * 2, 40, [], temperature=0)
    sampling = asyncio.ensure_future(lm.batch_sample([context] * 2, 40, [], temperature=0))
    for _ in range(3):
        await lm.next_token_logprobs([5, 6])  # a step or two
        lm.clear_cache()
    assert await sampling == alone
    for numbers in ([1], [2], [3, 1]):
        text, images = prompt_of(numbers)
        row = await lm.next_token_logprobs(lm.context(text, images=images))
        close(row, plain_row(text, images))


@pytest.mark.vllm
def test_step_computes_only_its_new_tokens(lm):
    lm.clear_cache()
    context = lm.context(prompt_of([5])[0], images=[picture(5)])
    lm.next_token_logprobs_sync(context)
    before = lm.statistics().tokens_computed
    lm.batch_next_token_logprobs_sync([context.extend(i + 5) for i in range(9)])
    assert lm.statistics().tokens_computed == before + 9


@pytest.mark.vllm
def test_evicted_picture_contexts_are_recomputed_exactly(lm):
    """More contexts with pictures than there are blocks and places for."""
    prompts = [prompt_of([number]) for number in range(40)]
    for _ in range(2):
        contexts = [lm.context(text, images=images) for text, images in prompts]
        rows = lm.batch_next_token_logprobs_sync(contexts)
        for row, prompt in zip(rows[::7], prompts[::7], strict=True):
            close(row, plain_row(*prompt))


@pytest.mark.vllm
def test_pictures_are_encoded_again_after_clear_cache(lm):
    engine, (model, _) = lm._vllm.engine, family()
    if not engine._core.is_local:
        pytest.skip("vLLM's model is not here")
    text, images = prompt_of([4])
    context = lm.context(text, images=images)

    @torch.no_grad()
    def change(model):
        for name, weight in model.named_parameters():
            if name.endswith("patch_embedding.weight"):
                weight.neg_()

    for _ in range(2):
        lm.next_token_logprobs_sync(context)
        change(model)
        lm._call(lambda: engine._llm.apply_model(change))
        lm.clear_cache()
        close(lm.next_token_logprobs_sync(context), plain_row(text, images))


@pytest.mark.vllm
def test_scores_samples_and_pickled_contexts_of_pictures_are_exact(lm):
    text, images = prompt_of([3])
    context = lm.context(text, images=images)
    scores = lm.score_sync(context, [7, 8])
    for i, more in enumerate([[], [7]]):
        assert abs(float(scores[i]) - float(plain_row(text, images, more)[[7, 8][i]])) < TOLERANCE
    for other in (copy.copy(context), pickle.loads(pickle.dumps(context))):
        close(lm.next_token_logprobs_sync(other.extend(9)), plain_row(text, images, [9]))

    model, processor = family()
    with AsyncTransformer(model, processor.tokenizer, processor=processor) as other:
        for mine, theirs in ((lm, other), (other, lm)):
            made = pickle.loads(pickle.dumps(mine.context(text, images=images)))
            with pytest.raises(PictureError, match="this model cannot read"):
                theirs.next_token_logprobs_sync(made)

    async def main():
        (ids,) = await lm.batch_sample([context], 4, [], temperature=0.0)
        info = MultiMediaInfo(images=images)
        (made,) = await generate(lm, text, max_new_tokens=4, early_stopping=False, mm_info=info)
        return ids, made.token_ids

    sampled, generated = asyncio.run(main())
    expected = []
    for _ in range(4):
        row = plain_row(text, images, expected)
        row[sorted(lm.undefined_ids)] = -torch.inf
        expected.append(int(row.argmax()))
    assert sampled == list(generated) == expected


@pytest.mark.vllm
def test_mismatched_and_unreadable_pictures_are_refused(lm):
    image = picture(1)
    for prompt, images, message in (
        ("a <image> b", [], "got 1 .*pictures: 0"),
        ("a", [image], "got 0 .*pictures: 1"),
        ([5, 6], [image], "got 0 .*pictures: 1"),
        ("<image>", [b"no picture"], "picture 0 cannot be read"),
        ("<image>", {"pixel_values": torch.zeros(1)}, "processor itself"),
        ("<image>" * 9, [image] * 9, "maximum|longer|length"),
    ):
        with pytest.raises(PictureError.__mro__[1], match=message):
            lm.context(prompt, images=images)
    with pytest.raises(PictureError, match="contains the image token"):
        lm.next_token_logprobs_sync([5, lm.contexts.image_token_id])
    prompt = lm.context([5, lm.contexts.image_token_id, 6], images=[image])
    close(lm.next_token_logprobs_sync(prompt), plain_row(_text(prompt), [image]))


def _text(context):
    """The prompt that a context with one picture was made of."""
    tokenizer = family()[1].tokenizer
    ids = list(context)
    return tokenizer.decode(ids[:1]) + "<image>" + tokenizer.decode(ids[-1:])


def test_a_model_of_text_alone_refuses_pictures():
    with (
        AsyncVirtualLM(fake.FakeEngine()) as lm,
        pytest.raises(PictureError, match="accepts no pictures"),
    ):
        lm.context([1], images=[picture(1)])
