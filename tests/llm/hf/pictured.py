"""Models that read pictures, and the plain model's row behind a prompt with them."""

import functools

import torch

from genlm_backend import AsyncTransformer
from tests.llm import families
from tests.llm.picture_families import FAMILIES, inputs, make, marker, picture

TOLERANCE = 2e-5
MANY = [name for name in FAMILIES if name != "paligemma"]
"""Families that read several pictures, and go on from what is kept."""


@functools.cache
def family(name):
    return make(name)


def over(name, **options):
    model, processor = family(name)
    given = {"row_cache_bytes": 0, "kv_cache_bytes": 1 << 22, "self_check": False, **options}
    return AsyncTransformer(model, processor.tokenizer, processor=processor, **given)


@torch.no_grad()
def plain_row(name, text, images, more=()):
    """The row behind a prompt and more tokens: each goes on by the model's own cache."""
    model, processor = family(name)
    made = inputs(model, processor, text, images)
    out = model(**made, use_cache=True)
    for token_id in more:
        kept = {families.CACHE: getattr(out, families.CACHE), "use_cache": True}
        out = model(input_ids=torch.tensor([[token_id]]), **kept)
    return out.logits[0, -1].float().log_softmax(-1)


def prompt_of(name, numbers, before="ab ", after=" ef"):
    text = before + " cd ".join([marker(name)] * len(numbers)) + after
    return text, [picture(number) for number in numbers]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
