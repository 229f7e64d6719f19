"""Naive references: short loops over whole contexts and rows, one for each fast path.

- ``naive_attention``: cascade attention (``attention/``), eager or in captured decode steps.
- ``naive_row``: cached and decode steps of ``scheduling/`` and the passes of every backend.
- ``naive_scores``: scores of a text from one pass that continues cached tokens.
- ``naive_longest_prefix``: ``PrefixTree.match`` and ``common_length``.
- ``naive_batch``: the batching of awaits (``batching/``).
- ``naive_draw``, ``naive_log_proposals``: draws from rows, tables and groups of particles.
- ``naive_kept``: the bounds ``top_k``, ``top_p`` and ``min_p`` of draws.
- ``naive_trie_weights``: the tries' sums, maxima and log-sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Mask = NDArray[np.bool_]


def naive_attention(
    query: Floats,
    keys: Floats,
    values: Floats,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """Attend by a token ``[heads, dim]`` to its keys ``[key_heads, n, dim]``, its own one last."""
    group_size, first = len(query) // len(keys), -(window or 0)
    keys, values = (part[:, first:].repeat(group_size, 0) for part in (keys, values))
    scores = np.einsum("hd,hnd->hn", query, keys, dtype=np.float64) * scale
    if softcap is not None:
        scores = np.tanh(scores / softcap) * softcap
    weights = np.exp(scores)
    total = weights.sum(1) + (0 if sinks is None else np.exp(sinks.astype(np.float64)))
    return np.einsum("hn,hnd->hd", weights / total[:, None], values, dtype=np.float64)


@torch.no_grad()
def naive_rows(model: Any, text: Sequence[int]) -> torch.Tensor:
    """Return the row after each token of a text, from one uncached pass: float64 ``[n, vocab]``."""
    return model(input_ids=torch.tensor([list(text)])).logits[0].double().log_softmax(-1)


def naive_row(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the row of a context that a model of transformers gives it, whole and alone."""
    return naive_rows(model, token_ids)[-1].float()


def naive_scores(model: Any, text: Sequence[int], start: int) -> torch.Tensor:
    """Return the log-probability of each token of a text from ``start`` on."""
    return naive_rows(model, text)[range(start - 1, len(text) - 1), list(text[start:])].float()


def naive_longest_prefix(token_ids: Sequence[int], cached: Iterable[Sequence[int]]) -> int:
    """Return how many first tokens a context shares with one of the cached contexts, at most."""
    longest = 0
    for other in cached:
        length = 0
        while length < min(len(token_ids), len(other)) and token_ids[length] == other[length]:
            length += 1
        longest = max(longest, length)
    return longest


def naive_batch(evaluate: Callable[[list[Any]], Sequence[Any]], queries: Iterable[Any]) -> list:
    """Evaluate each query alone."""
    return [evaluate([query])[0] for query in queries]


def naive_log_proposals(row: Floats, allowed: Mask | None, temperature: float) -> Floats:
    """Return the log-probability with which each token is drawn: float64 ``[vocab]``."""
    scores = row.astype(np.float64)
    if allowed is not None:
        scores[~allowed] = -np.inf
    if temperature == 0:
        return np.where(np.arange(len(row)) == scores.argmax(), 0.0, -np.inf)
    scores -= scores.max()
    scores[np.isfinite(scores)] /= min(temperature, 1e300)
    return scores - np.log(np.exp(scores).sum())


def naive_draw(
    row: Floats, allowed: Mask | None, temperature: float, uniform: float, slack: float = 1e-5
) -> set[int]:
    """Return the possible tokens whose part of the cumulative sum is within slack of a number."""
    shares = np.exp(naive_log_proposals(row, allowed, temperature))
    ends = shares.cumsum()
    is_near = (ends > uniform - slack) & (ends - shares < uniform + slack)
    return set(np.flatnonzero(is_near & (shares > 0)).tolist())


def naive_kept(
    row: Floats, allowed: Mask, temperature: float, top_k: int, top_p: float, min_p: float
) -> Mask:
    """Return which tokens the warpers of transformers leave, in float64: bool ``[vocab]``."""
    from transformers.generation import logits_process as processes

    scores = torch.from_numpy(np.where(allowed, row.astype(np.float64), -np.inf))[None]
    warpers: list[Any] = [processes.TemperatureLogitsWarper(float(temperature))]
    warpers += [processes.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [processes.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [processes.MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.int64), scores)
    return np.isfinite(scores[0].numpy())


def naive_trie_weights(decode: Iterable[Any], weights: Floats, operation: str) -> dict[tuple, Any]:
    """Return the weight of every prefix of a vocabulary's items, from a loop over the items."""
    below: dict[tuple, list[float]] = {}
    for letters, weight in zip(map(tuple, decode), weights.tolist(), strict=True):
        for length in range(len(letters) + 1):
            below.setdefault(letters[:length], []).append(weight)
    return {prefix: _OPERATIONS[operation](np.array(own)) for prefix, own in below.items()}


_OPERATIONS: dict[str, Callable[[Floats], float]] = {
    "sum": lambda values: math.fsum(values) if np.isfinite(values).all() else values.sum(),
    "max": np.max,
    "log_sum": np.logaddexp.reduce,
}
