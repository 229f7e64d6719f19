"""generate and stream: texts of a model, token by token, beside whatever else it is asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from genlm_backend.checks import instance
from genlm_backend.errors import GenerationConfigError
from genlm_backend.generation.beam_search import BeamSearch
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.draft import Draft, Sample
from genlm_backend.generation.generated import GeneratedToken, Generation
from genlm_backend.generation.prompt import Chat, Prompt
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.model.query import TokenIds
from genlm_backend.runtime.background_loop import BackgroundLoop
from genlm_backend.runtime.together import together


async def generate(
    lm: AsyncLM,
    prompt: str | Chat | TokenIds,
    config: GenerationConfig | None = None,
    **fields: Any,
) -> list[Generation]:
    """Generate ``config.n`` texts after a prompt, all at the same time.

    Args:
        lm: The model; what else it is asked meanwhile shares its batches.
        prompt: A text; a chat's messages, ``[{"role": …, "content": …}, …]``, which the model's
            chat template puts together; or token ids.
        config: How; by default greedily, until a token of ``lm.eos_token_ids`` comes, or to the
            model's limit.
        **fields: Fields of the configuration, in place of its own.

    Raises:
        ContextError: (``ValueError``) If the prompt is empty, leaves no room for a token, or
            cannot be encoded: the model's tokenizer takes no text, or has no chat template.
        ContextTypeError: (``TypeError``) If its ids are not integers.
        GenerationConfigError: (``ValueError``) If the configuration does not go with the model.
    """
    instance(AsyncLM, "an AsyncLM")("lm", lm)
    config = make_config(config, fields)
    drafts = make_drafts(lm, Prompt.check(lm, prompt, config), config)
    texts: dict[int, list[GeneratedToken]] = defaultdict(list)

    async def finish(draft: Draft) -> None:
        while not draft.is_finished:
            await draft.ask()
            for number, token in draft.choose():
                texts[number].append(token)

    await together(map(finish, drafts))
    scores = {number: score for draft in drafts for number, score in draft.scores.items()}
    return [
        Generation.of_tokens(tokens, score=scores.get(number))
        for number, tokens in sorted(texts.items())
    ]


def generate_sync(
    lm: AsyncLM,
    prompt: str | Chat | TokenIds,
    config: GenerationConfig | None = None,
    **fields: Any,
) -> list[Generation]:
    """Return the same texts as ``generate``, blocking the calling thread.

    Works in a notebook too, whose event loop waits for it.
    """
    loop = BackgroundLoop("generate")
    try:
        return loop.run(generate(lm, prompt, config, **fields))
    finally:
        loop.close()


async def stream(
    lm: AsyncLM,
    prompt: str | Chat | TokenIds,
    config: GenerationConfig | None = None,
    **fields: Any,
) -> AsyncIterator[GeneratedToken]:
    """Generate one text after a prompt, and yield its tokens as they come.

    It ends where that of ``generate`` does.

    Raises:
        GenerationConfigError: (``ValueError``) If ``n`` or ``num_beams`` is not 1; otherwise as
            ``generate``.
    """
    instance(AsyncLM, "an AsyncLM")("lm", lm)
    config = make_config(config, fields)
    check_streamable(config)
    (draft,) = make_drafts(lm, Prompt.check(lm, prompt, config), config)
    while not draft.is_finished:
        await draft.ask()
        for _, token in draft.choose():
            yield token


def make_config(config: GenerationConfig | None, fields: dict[str, Any]) -> GenerationConfig:
    """Return the configuration that a caller means.

    Raises:
        GenerationConfigError: If it is none, or a field is wrong.
    """
    if config is not None and not isinstance(config, GenerationConfig):
        is_theirs = hasattr(config, "to_diff_dict")
        hint = " of transformers: GenerationConfig.from_hf takes it" if is_theirs else ""
        raise GenerationConfigError(
            f"config must be a GenerationConfig, got {type(config).__name__}{hint}"
        )
    config = config or GenerationConfig()
    return config.replace(**fields) if fields else config


def make_drafts(lm: AsyncLM, prompt: Prompt, config: GenerationConfig) -> list[Draft]:
    """Return the drafts that make the texts: one for each, or one beam search."""
    if config.num_beams > 1:
        return [BeamSearch(lm, prompt, config)]
    return [Sample(lm, prompt, config, number) for number in range(config.n)]


def check_streamable(config: GenerationConfig) -> None:
    """Raise a ``GenerationConfigError`` unless there is one text, whose tokens come in order."""
    for name in ("n", "num_beams"):
        if getattr(config, name) != 1:
            raise GenerationConfigError(f"{name} must be 1 to stream, got {getattr(config, name)}")
