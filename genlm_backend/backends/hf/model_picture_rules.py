"""Finds by trial passes, not by a model's name, how the model continues text after pictures."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from transformers.cache_utils import DynamicCache

from genlm_backend.attention.forward_batch import AttentionBackend, TokenChunk, pack
from genlm_backend.attention.torch.multimodal_prefill import (
    MultimodalPrefillAttention,
    positions_of,
)
from genlm_backend.backends.hf.forward_names import given_cache
from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.trial import distance, paths_of, row_of
from genlm_backend.errors import PictureError, QueryDroppedError
from genlm_backend.multimodal.pictures import PictureRules, Pictures, image_token_id_of
from genlm_backend.prefix.kv_pool import KVLayout, KVPool

logger = logging.getLogger(__name__)

_SHARE_OF_SPREAD: Final = 0.01
"""Accepted distance of two-pass from one-pass rows, as a share of a wrong token's effect."""

_TIMES_THE_LEAST: Final = 4
"""Accepted distance of two-pass from one-pass rows, as a multiple of the smallest of all rules."""

_NUM_TAIL: Final = 12
"""Number of tokens that a trial adds to the prompt."""

_NUM_ROWS: Final = 3
"""Number of last tokens after which rows are compared."""


def image_token_id(model: Any) -> int | None:
    """Return the id of a picture's placeholder tokens; ``None`` if a model reads no pictures."""
    return image_token_id_of(model.config) if "pixel_values" in _parameters(model) else None


def _parameters(model: Any) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def examine_pictures(
    runner: HFRunner,
    layout: KVLayout,
    attention: Callable[[KVPool], AttentionBackend],
    token_ids: Sequence[int],
    inputs: Mapping[str, torch.Tensor],
    image_token_id: int,
) -> PictureRules:
    """Return the rules by which a model continues text after pictures, found by a few passes."""
    # For each set of rules, a prompt and more tokens run in one pass, and again in two passes: the
    # prompt, or its part up to the last picture, then the rest from the cache. The result is
    # the first set whose two-pass rows are near its one-pass rows: at a distance of at most 4 times
    # the least that any set reaches, or at most a hundredth of the effect of a wrong token.
    size = len(token_ids)
    end = max(i for i, token_id in enumerate(token_ids) if token_id == image_token_id) + 1
    of_tokens = frozenset(n for n, value in inputs.items() if value.shape == (1, size))
    texts = [token_ids[-1], *(i for i in range(3, 9) if i not in (image_token_id, token_ids[-1]))]
    ids = [*token_ids, *(texts[i % len(texts)] for i in range(_NUM_TAIL))]
    kept = [PictureRules(), *(PictureRules(True, suffix) for suffix in (0, 1))]
    whole_only = [PictureRules(True, suffix, keeps=False) for suffix in (0, 1)]
    found: dict[PictureRules, float] = {}
    spread, cause = 0.0, None
    for rules in [*(kept if layout.layers else ()), *whole_only]:
        num_tokens = size if rules.is_prompt_one else end
        pictures = Pictures.of(
            *(token_ids, inputs, num_tokens, image_token_id, of_tokens),
            suffix=rules.suffix,
            keeps=rules.keeps,
        )
        try:
            whole, wrong = (
                _whole(runner, layout, pictures, some)
                for some in (ids, [*ids[:size], texts[1], *ids[size + 1 :]])
            )
            if rules.keeps:
                rows = _in_steps(runner, layout, attention, pictures, ids)
            else:
                rows = _as_the_model_goes_on(runner, pictures, ids)
        except QueryDroppedError:
            raise
        except Exception as error:  # third-party model code may raise anything
            logger.debug("%s: %s", type(runner.model).__name__, rules, exc_info=error)
            cause = error
            continue
        spread = max(spread, distance(whole, wrong))
        found[rules] = distance(rows, whole)
    if not found:
        raise PictureError(
            f"{type(runner.model).__name__} fails with every supported way to continue text after "
            f"pictures: {cause}"
        ) from cause
    near = max(_TIMES_THE_LEAST * min(found.values()), _SHARE_OF_SPREAD * spread)
    return next(rules for rules, apart in found.items() if apart <= near)


def _whole(runner: HFRunner, layout: KVLayout, pictures: Pictures, ids: list[int]) -> torch.Tensor:
    last = range(len(ids) - _NUM_ROWS, len(ids))
    return row_of(
        runner.forward(
            pack([TokenChunk(ids, outputs=last)]), MultimodalPrefillAttention(pictures, layout)
        )
    )


def _in_steps(
    runner: HFRunner,
    layout: KVLayout,
    attention: Callable[[KVPool], AttentionBackend],
    pictures: Pictures,
    ids: list[int],
) -> torch.Tensor:
    stop, size = pictures.num_tokens, len(ids)
    pool = KVPool(layout, size)
    slots = range(1, stop + 1)
    runner.forward(
        pack([TokenChunk(ids[:stop])]),
        MultimodalPrefillAttention(pictures, layout, pool, slots, stop),
    )
    opening = torch.tensor([ids[:stop]], dtype=torch.int64)
    _, shift = positions_of(runner.model, opening, pictures)
    behind = TokenChunk(
        ids[stop:], range(stop + 1, size + 1), range(size - stop - _NUM_ROWS, size - stop), shift
    )
    return row_of(runner.forward(pack([behind], paths_of([slots])), attention(pool)))


@torch.inference_mode()
def _as_the_model_goes_on(runner: HFRunner, pictures: Pictures, ids: list[int]) -> torch.Tensor:
    """Run ``ids`` in two passes with a ``DynamicCache``; return the rows after the last ids."""
    size, taken, cache = pictures.num_tokens, _parameters(runner.model), DynamicCache()
    dtype = next(runner.model.parameters()).dtype
    inputs = {
        name: (value.to(dtype) if value.is_floating_point() else value).to(runner.device)
        for name, value in pictures.inputs.items()
        if name in taken
    }
    prompt, rest = (
        torch.tensor([part], dtype=torch.int64, device=runner.device)
        for part in (ids[:size], ids[size:])
    )
    kept = {**given_cache(runner.model, cache), "use_cache": True}
    runner.view.module(input_ids=prompt, **inputs, **kept)
    logits = runner.view.module(input_ids=rest, **kept).logits
    return row_of(logits[0, -_NUM_ROWS:])
