"""Contexts that begin with pictures: rows are those of the plain model, whatever is kept."""

import asyncio
import copy
import io
import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image

from genlm_backend import (
    AsyncGLM,
    AsyncTransformer,
    Engine,
    GenerationConfig,
    MockAsyncLM,
    MultiMediaInfo,
    generate,
)
from genlm_backend.errors import ContextError, GenerationConfigError, PictureError
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.hf.pictured import MANY, close, family, over, plain_row, prompt_of
from tests.llm.picture_families import FAMILIES, inputs, marker, picture
from tests.tree_integrity import check_integrity

pytestmark = pytest.mark.filterwarnings("ignore")

# -------------------------------------------------------------------- rows


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_with_pictures_match_plain_model(name):
    numbers = [1, 2] if name in MANY else [1]
    prompt = prompt_of(name, numbers, before="ab " if name in MANY else "")
    with over(name) as lm:
        context = lm.context(prompt[0], images=prompt[1])
        for more in ([], [7], [7, 8, 9]):
            row = lm.next_token_logprobs_sync(context + more)
            close(row, plain_row(name, *prompt, more))
            close(lm.next_token_logprobs_uncached(context + more), row)


@pytest.mark.parametrize("name", MANY)
def test_forks_batched_with_texts_and_other_pictures_match_plain_model(name):
    """Contexts of several prompts, with and without pictures, ragged, in the same batches."""
    generator = random.Random(0)
    prompts = [prompt_of(name, numbers) for numbers in ([1], [2], [1, 2], [2, 1])]
    prompts.append(prompt_of(name, [1], after=" g" * 80))  # with more than a little behind it
    with over(name) as lm:
        grown = [(lm.context(text, images=images), (text, images), []) for text, images in prompts]
        size = len(lm.byte_vocab) - 20  # of plain tokens
        for _ in range(3):
            texts = [generator.choices(range(3, size), k=generator.randint(1, 9)) for _ in range(3)]
            rows = lm.batch_next_token_logprobs_sync([*(c for c, *_ in grown), *texts])
            for row, (_, prompt, more) in zip(rows, grown, strict=False):
                close(row, plain_row(name, *prompt, more))
            for row, text in zip(rows[len(grown) :], texts, strict=True):
                close(row, lm.next_token_logprobs_uncached(text))
            forks = [generator.choice(grown) for _ in range(7)]
            new = [generator.choices(range(3, size), k=generator.randint(1, 3)) for _ in forks]
            grown = [(c + n, p, [*m, *n]) for (c, p, m), n in zip(forks, new, strict=True)]
        check_integrity(lm._hf.scheduler.tree)


@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3"])
def test_step_computes_only_its_new_tokens(name):
    text, images = prompt_of(name, [1])
    with over(name) as lm:
        context = lm.context(text, images=images)
        lm.next_token_logprobs_sync(context)
        assert lm.statistics().tokens_computed == len(context)
        lm.batch_next_token_logprobs_sync([context + [i + 5] for i in range(20)])
        assert lm.statistics().tokens_computed == len(context) + 20
        assert asyncio.run(lm.num_cached_tokens(context + [5, 6])) == len(context) + 1


def test_equal_pictures_share_all_and_others_only_preceding_tokens():
    with over("qwen2-vl") as lm:
        contexts = [
            lm.context(*prompt_of("qwen2-vl", numbers)[:1], images=map(picture, numbers))
            for numbers in ([1, 2], [1, 2], [1, 3], [4, 2])
        ]
        first, same, other, another = contexts
        assert first == same
        assert hash(first) == hash(same)
        assert first not in (other, another)
        assert list(first) == list(other)
        lm.next_token_logprobs_sync(first)
        end = first.pictures.num_tokens
        places = [i for i, id_ in enumerate(first) if id_ == first.pictures.image_token_id]
        second = next(j for i, j in itertools.pairwise(places) if j > i + 1)
        counts = [asyncio.run(lm.num_cached_tokens(c)) for c in contexts]
        assert counts == [len(first) - 1, len(first) - 1, second, places[0]]
        assert end == places[-1] + 1


def test_adjacent_pictures_are_shared_only_as_one():
    with over("llava-next") as lm:
        for between, is_shared in (("", False), (" cd ", True)):
            text = "ab " + between.join([marker("llava-next")] * 2) + " ef"
            first, other = (lm.context(text, images=map(picture, p)) for p in ([1, 2], [1, 3]))
            lm.next_token_logprobs_sync(first)
            is_far = asyncio.run(lm.num_cached_tokens(other)) > first.pictures.num_tokens // 2
            assert is_far == is_shared


def test_evicted_pictures_are_recomputed():
    """A budget that holds one context with pictures and little more."""
    name, generator = "smolvlm", random.Random(1)
    prompts = [prompt_of(name, [i]) for i in range(4)]
    layout = over(name)
    per_slot = layout._hf.scheduler.cache.layout.bytes_per_slot
    layout.close()
    with over(name, kv_cache_bytes=per_slot * 70) as lm:
        contexts = [lm.context(text, images=images) for text, images in prompts]
        assert len(contexts[0]) < 70 < 2 * len(contexts[0])
        for _ in range(6):
            chosen = [generator.randrange(4) for _ in range(5)]
            more = [generator.choices(range(3, 90), k=generator.randint(0, 3)) for _ in chosen]
            asked = [contexts[i] + m for i, m in zip(chosen, more, strict=True)]
            for row, i, m in zip(
                lm.batch_next_token_logprobs_sync(asked), chosen, more, strict=True
            ):
                close(row, plain_row(name, *prompts[i], m))
            check_integrity(lm._hf.scheduler.tree)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_rows_with_kv_cache_dtype_match_uncached_rows(dtype):
    text, images = prompt_of("llava-next", [1, 2])
    with over("llava-next", kv_cache_dtype=dtype) as lm:
        context = lm.context(text, images=images)
        for more in ([], [7], [7, 8]):
            row = lm.next_token_logprobs_sync(context + more)
            close(row, lm.next_token_logprobs_uncached(context + more))


def test_context_ending_with_picture_matches_plain_model():
    text = f"ab {marker('smolvlm')}"
    with over("smolvlm") as lm:
        context = lm.context(text, images=[picture(1)])
        for _ in range(2):
            close(lm.next_token_logprobs_sync(context), plain_row("smolvlm", text, [picture(1)]))
        row = lm.next_token_logprobs_sync(context + [7])
        close(row, plain_row("smolvlm", text, [picture(1)], [7]))


# -------------------------------------------------------------------- everything else


def test_scores_samples_and_generation_match_plain_model():
    name, text, images = "qwen2-vl", *prompt_of("qwen2-vl", [1, 2])
    with over(name) as lm:
        context = lm.context(text, images=images)
        scores = lm.score_sync(context, [7, 8, 9])
        rows = [plain_row(name, text, images, [7, 8, 9][:i]) for i in range(3)]
        close(scores, torch.stack([row[t] for row, t in zip(rows, [7, 8, 9], strict=True)]))
        greedy = asyncio.run(lm.sample(context, 5, [], temperature=0.0))
        expected = []
        for _ in range(5):
            expected.append(int(plain_row(name, text, images, expected).argmax()))
        assert greedy == expected
        fields = {"max_new_tokens": 5, "eos_token_id": ()}
        (made,) = asyncio.run(generate(lm, context, **fields))
        assert list(made.token_ids) == expected
        config = GenerationConfig(mm_info=MultiMediaInfo(images=images), **fields)
        (made,) = asyncio.run(generate(lm, text, config))
        assert list(made.token_ids) == expected
        (best, *_) = asyncio.run(generate(lm, text, config.replace(num_beams=2)))
        assert len(best.token_ids) == 5
        with Engine() as engine:
            engine.install_model("m", lm, warm_up=False)
            engine.start_model("m")
            requests = [engine.start_request_text("m", text, config) for _ in range(3)]
            for request in requests:
                assert list(request.result(60)[0].token_ids) == expected
        with pytest.raises(PictureError, match="got 2 "):
            asyncio.run(generate(lm, text, config, mm_info=MultiMediaInfo(images[:1])))
    with pytest.raises(GenerationConfigError, match="images"):
        MultiMediaInfo(images=3)


@pytest.mark.parametrize("name", MANY)
def test_token_ids_with_processor_inputs_match_text_prompt(name):
    """What the processor returns, with its inputs."""
    text, images = prompt_of(name, [1, 2])
    made = inputs(*family(name), text, images)
    with over(name) as lm:
        context = lm.context(made["input_ids"][0], images=made)
        assert list(context) == list(lm.context(text, images=images))
        close(lm.next_token_logprobs_sync(context), plain_row(name, text, images))
        with pytest.raises(PictureError, match="pictures need a text"):
            lm.context(made["input_ids"][0], images=images)


def test_processor_output_is_accepted_by_context_and_glm_task():
    name, (text, images) = "gemma3", prompt_of("gemma3", [1, 2])
    made = inputs(*family(name), text, images)
    with over(name) as lm:
        given = {"pixel_values": made["pixel_values"], "token_type_ids": made["token_type_ids"]}
        context = lm.context(made["input_ids"][0], images=given)
        close(lm.next_token_logprobs_sync(context + [7]), plain_row(name, text, images, [7]))
        greedy = asyncio.run(lm.sample(context, 4, [], temperature=0.0))
        with AsyncGLM(lm) as glm:
            task = glm.submit(made, {"max_new_tokens": 4, "eos_token_id": 0, "do_sample": False})
            assert glm.get_result(task, 60)[0, -4:].tolist() == greedy
            twice = {name: torch.cat([value, value]) for name, value in made.items()}
            with pytest.raises(ContextError, match="one row without padding"):
                glm.submit(twice)
        with pytest.raises(PictureError, match="contain no image token"):
            lm.context([5, 6], images=given)
        with pytest.raises(PictureError, match="must be tensors"):
            lm.context(made["input_ids"][0], images={"pixel_values": "x"})


@pytest.mark.timeout(240)
def test_replicas_read_pictures():
    from genlm_backend import AsyncReplicas
    from genlm_backend.backends.hf.hf_evaluator import HFEvaluator

    model, processor = family("llava-next")
    evaluators = [HFEvaluator(copy.deepcopy(model), num_threads=1) for _ in range(2)]
    options = {"processor": processor, "self_check": False, "row_cache_bytes": 0}
    with AsyncReplicas(processor.tokenizer, evaluators, **options) as lm:
        prompts = [prompt_of("llava-next", [i]) for i in range(4)]
        contexts = [lm.context(text, images=images) for text, images in prompts]
        rows = lm.batch_next_token_logprobs_sync([c + [i + 5] for c in contexts for i in range(3)])
        for row, (i, j) in zip(rows, itertools.product(range(4), range(3)), strict=True):
            close(row, plain_row("llava-next", *prompts[i], [j + 5]))


def test_pictures_in_any_input_form_give_equal_contexts(tmp_path):
    image = picture(1)
    image.save(tmp_path / "one.png")
    raw = io.BytesIO()
    image.save(raw, "PNG")
    text = prompt_of("gemma3", [1])[0]
    kinds = [image, np.asarray(image), tmp_path / "one.png", str(tmp_path / "one.png")]
    with over("gemma3") as lm:
        contexts = [lm.context(text, images=[one]) for one in [*kinds, raw.getvalue()]]
        assert len(set(contexts)) == 1
        assert lm.context(text, images=[image.convert("RGBA")]) == contexts[0]


def test_picture_context_supports_indexing_slicing_and_pickling():
    with over("qwen2-vl") as lm:
        text, images = prompt_of("qwen2-vl", [1])
        context = lm.context(text, images=images)
        placeholder, end = context.pictures.image_token_id, context.pictures.num_tokens
        assert context[end - 1] == placeholder
        assert list(context).count(placeholder) == sum(i < 0 for i in context.packed())
        assert (context + [5, 6])[: len(context)] == context
        assert (context + [5])[:end].pictures is context.pictures
        assert context[:2] == lm.context(list(context[:2]))
        assert context[end:] == lm.context(list(context)[end:])
        assert "pictures" in repr(context)
        with pytest.raises(PictureError, match="contain only a part"):
            context[: end - 1]
        with pytest.raises(PictureError, match="first token"):
            context[1:]
        with pytest.raises(PictureError, match="nothing can be prepended"):
            [5] + context
        again = pickle.loads(pickle.dumps(context + [5]))
        close(lm.next_token_logprobs_sync(again), lm.next_token_logprobs_sync(context + [5]))
    with over("gemma3") as other, pytest.raises(PictureError, match="this model cannot read"):
        other.next_token_logprobs_sync(again)


def test_pictures_are_sent_to_process_once(tmp_path):
    from genlm_backend import load_model_by_name
    from genlm_backend.remote import arguments

    model, processor = family("smolvlm")
    model.save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    text, images = prompt_of("smolvlm", [1, 2])
    sizes = []
    packed = arguments.ArgumentEncoder.packed

    def counted(self, given):
        found = packed(self, given)
        sizes.append(len(found))
        return found

    options = {"process": True, "self_check": False, "row_cache_bytes": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments.ArgumentEncoder, "packed", counted)
        with load_model_by_name(str(tmp_path), backend="hf", llm_opts=options) as lm:
            lm.processor = processor
            context = lm.context(text, images=images)
            close(lm.next_token_logprobs_sync(context), plain_row("smolvlm", text, images))
            sizes.clear()
            for more in ([7], [7, 8]):
                row = lm.next_token_logprobs_sync(context + more)
                close(row, plain_row("smolvlm", text, images, more))
            assert max(sizes) < 5000 < context.pictures.num_bytes
            lm.restart()
            row = lm.next_token_logprobs_sync(context + [9])
            close(row, plain_row("smolvlm", text, images, [9]))


# -------------------------------------------------------------------- refusals


def test_unreadable_pictures_and_prompts_raise_picture_error(tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    text, image = f"a {marker('qwen2-vl')}", picture(1)
    with over("qwen2-vl", max_length=40) as lm:
        placeholder = lm.contexts.image_token_id
        for prompt, images, reason in (
            (text, [], "got 1 .*pictures: 0"),
            (text, [image, image], "got 1 .*pictures: 2"),
            ("plain", [image], "got 0 .*pictures: 1"),
            (text, [broken], "picture 0 cannot be read"),
            (text, [b"no picture"], "picture 0 cannot be read"),
            (text, ["/no/such/file.png"], "picture 0 cannot be read"),
            (text, [np.zeros((4, 4))], r"uint8, got float64 \[4, 4\]"),
            (text, [3], "must be a PIL image"),
        ):
            with pytest.raises(PictureError, match=reason):
                lm.context(prompt, images=images)
        with pytest.raises(ContextError, match="more than the model's maximum of 40"):
            lm.context(text * 9, images=[image] * 9)
        for ask in (lm.context, lm.next_token_logprobs_sync, lm.score_sync):
            with pytest.raises(PictureError, match=f"image token {placeholder}"):
                ask(*[[5, placeholder]] * (2 if ask == lm.score_sync else 1))
        assert lm.statistics().num_awaits == 0
        with pytest.raises(TypeError):
            lm.context("a text")
        row = lm.next_token_logprobs_sync(lm.context("ab", images=[]))
        close(row, lm.next_token_logprobs_sync(lm.tokenizer("ab")["input_ids"]))
    model, processor = family("qwen2-vl")
    with (
        AsyncTransformer(model, processor.tokenizer, self_check=False) as blind,
        pytest.raises(PictureError, match="processor=AutoProcessor"),
    ):
        blind.context(text, images=[image])
    with (
        AsyncTransformer(families.make("llama"), word_tokenizer()) as lm,
        pytest.raises(PictureError, match="model is text-only"),
    ):
        lm.context(text, images=[image])
    with (
        MockAsyncLM(word_tokenizer()) as lm,
        pytest.raises(PictureError, match="accepts no pictures"),
    ):
        lm.context([1], images=[image])


def test_missing_pillow_error_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    with over("gemma3") as lm, pytest.raises(ImportError, match=r"genlm-backend\[images\]"):
        lm.context(marker("gemma3"), images=[Image.new("RGB", (4, 4))])
