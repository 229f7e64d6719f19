"""Contexts that begin with pictures: what a caller must not meet, and what is said instead."""

import asyncio
import pickle

import pytest
import torch
from PIL import Image

from genlm_backend import AsyncTransformer, Engine, GenerationConfig, MultiMediaInfo, generate
from genlm_backend.errors import ContextError, OptionTypeError, PictureError
from genlm_backend.generation.prompt import Prompt
from tests.llm.hf.pictured import TOLERANCE, close, family, over, plain_row, prompt_of
from tests.llm.picture_families import FAMILIES, inputs, make, marker, picture

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_picture_suffix_is_detected_in_any_precision(dtype):
    model, processor = make("paligemma")
    with AsyncTransformer(model.to(dtype), processor.tokenizer, processor=processor) as lm:
        pictures = lm.context(*prompt_of("paligemma", [1], before="")[:1], images=[picture(1)])
        assert (pictures.pictures.suffix, pictures.pictures.keeps) == (1, False)


def test_processor_of_wrong_type_raises_option_type_error():
    model, processor = make("paligemma")
    with pytest.raises(OptionTypeError, match="processor must be a processor of transformers"):
        AsyncTransformer(model, processor.tokenizer, processor=3)


def test_context_refused_by_model_fails_alone():
    name = "qwen2-vl"
    made = inputs(*family(name), *prompt_of(name, [1]))
    ids, rest = made["input_ids"][0], {n: v for n, v in made.items() if n in NAMES}
    with over(name) as lm:
        good = lm.context(ids, images=rest)
        bad = lm.context(ids, images={**rest, "pixel_values": rest["pixel_values"][:, :3]})
        rest["pixel_values"].zero_()  # what becomes of it does not matter

        async def ask():
            asked = [lm.context([5, 6]), bad, good, lm.context([8])]
            return await asyncio.gather(*map(lm.next_token_logprobs, asked), return_exceptions=True)

        first, error, second, third = asyncio.run(ask())
        assert isinstance(error, Exception)
        close(first, lm.next_token_logprobs_uncached([5, 6]))
        close(second, plain_row(name, *prompt_of(name, [1])))
        close(third, lm.next_token_logprobs_uncached([8]))


NAMES = {"pixel_values", "image_grid_thw", "mm_token_type_ids"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("budget", [0, 1 << 22])
def test_picture_token_may_appear_as_text(name, budget):
    """As a sampler draws it: the model reads it as its own cache would."""
    prompt = prompt_of(name, [1], before="" if name == "paligemma" else "ab ")
    with over(name, kv_cache_bytes=budget) as lm:
        context = lm.context(prompt[0], images=prompt[1])
        part = context.pictures.image_token_id
        for more in ([part], [7, part, 8], [part, 9]):
            row = lm.next_token_logprobs_sync(context + more)
            close(row, plain_row(name, *prompt, more))
            close(lm.next_token_logprobs_uncached(context + more), row)
        scores = lm.score_sync(context, [7, part, 8])
        for i, more in enumerate([[], [7], [7, part]]):
            row = plain_row(name, *prompt, more)
            assert abs(float(scores[i] - row[[7, part, 8][i]])) < TOLERANCE
        assert lm.score_sync(context, []).shape == (0,)


def test_mutually_attending_pictures_are_shared_together():
    name = "gemma3"
    model, processor = family(name)
    with over(name) as lm:
        part = lm.contexts.image_token_id
        for numbers in ([1, 2], [1, 3]):
            ids = [1, *[part] * 32, 7, 7]
            made = inputs(model, processor, *prompt_of(name, numbers))
            kinds = (torch.tensor([ids]) == part).long()
            images = {"pixel_values": made["pixel_values"], "token_type_ids": kinds}
            context = lm.context(ids, images=images)
            for more in ([], [9]):  # the second from what is kept of the first
                given = torch.tensor([ids + more])
                types = (given == part).long()
                with torch.no_grad():
                    pixels = made["pixel_values"]
                    out = model(input_ids=given, pixel_values=pixels, token_type_ids=types)
                row = lm.next_token_logprobs_sync(context + more)
                close(row, out.logits[0, -1].log_softmax(-1))


def test_short_prompt_is_not_mistaken_for_picture_shapes():
    """A prompt of three tokens, and a tensor of three numbers for each picture."""
    model, processor = make("qwen2-vl")
    processor.image_processor.size = {"shortest_edge": 196, "longest_edge": 3136}
    nothing_kept = {"row_cache_bytes": 0, "kv_cache_bytes": 0}
    with AsyncTransformer(model, processor.tokenizer, processor=processor, **nothing_kept) as lm:
        for text, size in ((marker("qwen2-vl"), (14, 14)), ("<|image_pad|>", (42, 14))):
            image = picture(2, size)
            made = inputs(model, processor, text, [image])
            with torch.no_grad():
                row = model(**made).logits[0, -1].log_softmax(-1)
            context = lm.context(text, images=[image])
            close(lm.next_token_logprobs_sync(context), row)


def test_pictures_are_rotated_by_exif_orientation(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(3, (41, 23)).save(tmp_path / "turned.png", exif=exif)
    with over("smolvlm") as lm:
        turned = picture(3, (41, 23)).transpose(Image.Transpose.ROTATE_270)
        contexts = [lm.context("<image>", images=[i]) for i in (tmp_path / "turned.png", turned)]
        assert contexts[0] == contexts[1]


def test_operations_that_would_lose_pictures_are_refused():
    with over("gemma3") as lm:
        context = lm.context(marker("gemma3"), images=[picture(1)])
        for use in (
            lambda: lm.context([5]) + context,
            lambda: context + context,
            lambda: lm.score_sync([5], context),
            lambda: lm.context(f"<image_soft_token> {marker('gemma3')}", images=[picture(1)]),
            lambda: lm.context(list(context), images={"token_type_ids": torch.ones(1, 1)}),
            lambda: lm.context(list(context), images={}),
            lambda: lm.context(marker("gemma3"), images=[torch.ones(2, 2, 3, requires_grad=True)]),
        ):
            with pytest.raises(PictureError):
                use()


def test_cached_rows_hold_no_pictures():
    import gc
    import weakref

    with over("gemma3", row_cache_bytes=1 << 20) as lm:
        context = lm.context(marker("gemma3"), images=[picture(1)])
        row = lm.next_token_logprobs_sync(context)
        pictures = weakref.ref(context.pictures)
        before = lm.statistics().num_forwards
        assert lm.next_token_logprobs_sync(context).equal(row)
        assert lm.statistics().num_forwards == before
        del context
        gc.collect()
        assert pictures() is None


@pytest.mark.parametrize("name", ["smolvlm", "paligemma"])
def test_an_engine_warms_up_a_model_that_reads_pictures(name):
    with over(name) as lm, Engine() as engine:
        engine.install_model("lm", lm, max_length=64)
        engine.start_model("lm")
        request = engine.start_request_text(
            "lm", marker(name), max_new_tokens=3, mm_info=MultiMediaInfo(images=[picture(1)])
        )
        assert request.result(60)[0].finish_reason


def test_chat_with_pictures_matches_its_prompt_text():
    """By the processor's own template, with pictures among the parts of a message."""
    name, image = "smolvlm", picture(1)
    template = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
        "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
        "{% endfor %} {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    chat = [{"role": "user", "content": parts}]
    with over(name) as lm:
        lm.processor.chat_template = template
        try:
            info = MultiMediaInfo(images=[image])
            asked = (chat, "user:<image>what? assistant:")
            first, second = (
                asyncio.run(generate(lm, prompt, max_new_tokens=4, mm_info=info))[0].token_ids
                for prompt in asked
            )
            assert first == second
            with pytest.raises(ContextError, match="mm_info"):
                asyncio.run(generate(lm, chat, max_new_tokens=4))
            context = lm.context(asked[1], images=[image])
            with pytest.raises(PictureError, match="already"):
                asyncio.run(generate(lm, context, max_new_tokens=4, mm_info=info))
        finally:
            lm.processor.chat_template = None


def test_model_without_picture_processor_refuses_pictures():
    model, processor = family("gemma3")
    with AsyncTransformer(model, processor.tokenizer, self_check=False) as lm:
        assert lm.processor is None
    with (
        AsyncTransformer(model, processor.tokenizer, processor=processor.tokenizer) as lm,
        pytest.raises(PictureError, match="AutoProcessor"),
    ):
        lm.context(marker("gemma3"), images=[picture(1)])


def test_pictures_read_by_another_library_are_refused():
    """A pickled context takes with it what its reader has made, which is not for others."""
    with over("gemma3") as lm:
        context = pickle.loads(pickle.dumps(lm.context(marker("gemma3"), images=[picture(1)])))
        lm.contexts.image_reader = "vLLM"
        with pytest.raises(PictureError, match="this model cannot read"):
            lm.next_token_logprobs_sync(context)


def test_chat_begins_with_one_bos_token():
    """Written by the template, and again by the processor."""
    name, info = "llava-next", MultiMediaInfo(images=[picture(1)])
    chat = [{"role": "user", "content": "<image>what?"}]
    with over(name) as lm:
        lm.processor.chat_template = "{{ bos_token }}{{ messages[0].content }}"
        try:
            config = GenerationConfig(mm_info=info)
            context = Prompt.from_prompt(lm, chat, config).context
            assert list(context).count(lm.tokenizer.bos_token_id) == 1
            assert context == lm.context("<image>what?", images=info.images)
            text = lm.tokenizer.bos_token + "<image>what?"
            assert context == lm.context(text, images=info.images)
            assert context == Prompt.from_prompt(lm, text, config).context
        finally:
            lm.processor.chat_template = None
