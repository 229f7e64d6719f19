"""What generation owes its callers on every backend alike."""

import asyncio
import random

import pytest
import torch

from genlm_backend.generation import Constraint, Engine, GenerationConfig, generate, stream
from tests.llm.conftest import backend, lm  # noqa: F401  (fixtures)

EOS = [7, 30, 31, 55]
SETTINGS = [
    {},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7, "no_repeat_ngram_size": 2},
    {"min_new_tokens": 7},
    {"num_beams": 3},
    {"num_beams": 4, "length_penalty": -0.5, "num_return_sequences": 2, "early_stopping": True},
]


def prompts(count=5, seed=0):
    generator = random.Random(seed)
    return [[generator.randrange(96) for _ in range(generator.randint(1, 7))] for _ in range(count)]


def reference(backend, prompt, settings):  # noqa: F811
    """The ids that transformers generates, or a plain loop over the backend's fresh rows."""
    model = backend.bare_model()
    if model is None:
        ids, eos = [], EOS
        while len(ids) < 9 and not (ids and ids[-1] in eos):
            ids.append(int(backend.expected(prompt + ids).argmax()))
        return [ids]
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=9,
        eos_token_id=EOS,
        pad_token_id=95,
        **settings,
    )
    return found[:, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
async def test_generate_and_engine_texts_equal_those_of_transformers(
    lm,  # noqa: F811
    backend,  # noqa: F811
    settings,
):
    if backend.bare_model() is None and settings:
        pytest.skip("there is no model of transformers to compare with")
    fields = dict(settings)
    if "num_beams" in fields:
        fields["n"] = fields.pop("num_return_sequences", 1)
        fields["beam_early_stopping"] = fields.pop("early_stopping", False)
    config = GenerationConfig(max_new_tokens=9, eos_token_id=EOS, **fields)
    direct = await asyncio.gather(*(generate(lm, prompt, config) for prompt in prompts()))
    with Engine() as engine:
        engine.install_model("m", lm, warm_up=False, max_batch=4)
        engine.start_model("m")
        requests = [engine.start_request_ids("m", prompt, config) for prompt in prompts()]
        requested = [await request for request in requests]
    for found in (direct, requested):
        for prompt, texts in zip(prompts(), found, strict=True):
            for text, row in zip(texts, reference(backend, prompt, settings), strict=True):
                assert text.token_ids == row[: len(text.token_ids)]
                assert set(row[len(text.token_ids) :]) <= {95}


async def test_seeded_samples_do_not_depend_on_concurrent_requests(lm):  # noqa: F811
    config = GenerationConfig(do_sample=True, seed=4, n=3, max_new_tokens=8, early_stopping=False)
    alone = await generate(lm, [5, 6], config)
    lm.clear_cache()
    crowd = [generate(lm, prompt, config) for prompt in prompts()]
    beside, *_ = await asyncio.gather(generate(lm, [5, 6], config), *crowd)
    streamed = [t.token_id async for t in stream(lm, [5, 6], config.replace(n=1))]
    alone, beside = [g.token_ids for g in alone], [g.token_ids for g in beside]
    assert alone == beside
    assert streamed == alone[0]


async def test_constrained_sampling_yields_only_the_choices(lm):  # noqa: F811
    pytest.importorskip("llguidance")
    choices = ["<3><4><5>", "<8><9>", "<3><4><6>"]
    constraint = Constraint.from_choice(lm, choices, eos_token_ids=[2])
    assert constraint.mask().sum() > 0
    texts = set()
    for seed in range(4):
        own, ids = constraint.fork(), []
        random_ = random.Random(seed)
        while not own.is_ended:
            row, mask = await asyncio.gather(
                lm.next_token_logprobs([1, *ids]), asyncio.to_thread(own.mask)
            )
            allowed, log_mass = own.restrict(row, mask)
            assert log_mass <= 0
            weights = allowed.exp().tolist()
            ids.append(random_.choices(range(len(weights)), weights)[0])
            own.advance(ids[-1])
        texts.add("".join(f"<{i}>" for i in ids if i != 2))
    assert texts <= set(choices)
