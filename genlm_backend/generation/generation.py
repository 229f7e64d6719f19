"""generate and stream: make texts token by token, batched with the model's other queries."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias, Unpack, overload

from genlm_backend.checks import instance, shows_options, switch
from genlm_backend.errors import ContextError, ContextTypeError, GenerationConfigError
from genlm_backend.generation.beam_search import BeamSearch
from genlm_backend.generation.config import (
    DEFAULT_MAX_NEW_TOKENS,
    GenerationConfig,
    GenerationFields,
)
from genlm_backend.generation.generated import GeneratedToken, Generation
from genlm_backend.generation.prompt import Chat, Prompt, is_many
from genlm_backend.generation.text_sequence import Sample, TextSequence
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.queries.context import Context
from genlm_backend.queries.query import TokenIds
from genlm_backend.runtime.background_loop import BackgroundLoop
from genlm_backend.runtime.blocking import blocking, is_blocking, warn_caller
from genlm_backend.runtime.progress import progress_bar
from genlm_backend.runtime.together import together

Prompts: TypeAlias = "Sequence[str] | Sequence[Chat] | Sequence[Sequence[int]] | Sequence[Context]"
"""Several prompts: a list of texts, of chats, of lists of token ids, or of contexts."""

_shows_fields = shows_options(
    GenerationFields,
    **{field.name: field.default for field in dataclasses.fields(GenerationConfig)},
)


@overload
async def generate(
    lm: AsyncLM,
    prompt: str | Chat | TokenIds,
    config: GenerationConfig | None = None,
    *,
    progress: bool = False,
    **fields: Unpack[GenerationFields],
) -> list[Generation]: ...


@overload
async def generate(
    lm: AsyncLM,
    prompt: Prompts,
    config: GenerationConfig | None = None,
    *,
    progress: bool = False,
    **fields: Unpack[GenerationFields],
) -> list[list[Generation]]: ...


@_shows_fields
async def generate(
    lm: AsyncLM,
    prompt: Any,
    config: GenerationConfig | None = None,
    *,
    progress: bool = False,
    **fields: Unpack[GenerationFields],
) -> list[Generation] | list[list[Generation]]:
    """Generate ``config.n`` texts after a prompt, or after each of several, all concurrently.

    Args:
        lm: The model. Other concurrent queries to it are evaluated in the same batches.
        prompt: A text, a chat, token ids, or a list of such prompts. The model's tokenizer adds
            its special tokens to a text, but no BOS if the text begins with one, as a rendered
            chat may. The chat template renders a chat's messages,
            ``[{"role": …, "content": …}, …]``.
        config: The configuration. By default, decoding is greedy and ends with a token of
            ``lm.eos_token_ids`` or after 20 tokens, with a warning if that limit cuts a text off.
        progress: Whether to show a progress bar of finished texts, on a terminal or in a notebook.
        **fields: Fields that override those of ``config``.

    Returns:
        The list of the prompt's texts; for several prompts, a list of such lists. Each
        sampled text has its own random stream.

    Raises:
        ContextError: (``ValueError``) If a prompt is empty, leaves no room for a token, or
            cannot be encoded, for example for lack of a chat template or a text tokenizer.
        ContextTypeError: (``TypeError``) If a prompt's ids are not integers.
        GenerationConfigError: (``ValueError``) If the configuration does not fit the model.
    """
    generated = partial(_generated, lm, prompt, config, progress, dict(fields))
    if await is_blocking():
        with closing(BackgroundLoop("generate")) as loop:
            warning, found = loop.run(generated())
    else:
        warning, found = await generated()
    if warning:
        warn_caller(warning)
    return found


generate_sync = blocking(generate, "texts")


@_shows_fields
async def stream(
    lm: AsyncLM,
    prompt: str | Chat | TokenIds,
    config: GenerationConfig | None = None,
    **fields: Unpack[GenerationFields],
) -> AsyncIterator[GeneratedToken]:
    """Generate one text after a prompt, and yield its tokens as they are chosen.

    The text ends by the same rules as with ``generate``.

    Raises:
        GenerationConfigError: (``ValueError``) If ``n`` or ``num_beams`` is not 1; otherwise as
            ``generate``.
    """
    instance(AsyncLM, "an AsyncLM")("lm", lm)
    given, config = _with_length(make_config(config, dict(fields)))
    check_streamable(config)
    (sequence,) = make_sequences(lm, Prompt.from_prompt(lm, prompt, config), config)
    tokens: list[GeneratedToken] = []
    while not sequence.is_finished:
        await sequence.ask()
        for token in sequence.choose():
            tokens.append(token)
            yield token
    if warning := _warning_of_cuts(given, tokens[-1:]):
        warn_caller(warning)


async def _generated(
    lm: AsyncLM, prompt: Any, config: GenerationConfig | None, progress: Any, fields: dict[str, Any]
) -> tuple[str, Any]:
    instance(AsyncLM, "an AsyncLM")("lm", lm)
    is_shown = switch("progress", progress)
    given, config = _with_length(make_config(config, fields))
    many = is_many(prompt)
    if isinstance(prompt, (list, tuple)) and not prompt:  # no ids, or no prompts
        raise ContextError("prompt is empty: pass at least one token or one prompt")
    prompts = _checked(lm, list(prompt) if many else [prompt], config, many)
    sequences = [
        make_sequences(lm, own, config, number * config.n) for number, own in enumerate(prompts)
    ]
    with progress_bar(len(prompts) * config.n, is_shown, "generating") as bar:
        found = await together(_finished(own, config.n, bar) for own in sequences)
    warning = _warning_of_cuts(given, [text for texts in found for text in texts])
    return warning, found if many else found[0]


async def _finished(sequences: list[TextSequence], num_texts: int, bar: Any) -> list[Generation]:
    """Run a prompt's sequences concurrently until they finish; return their texts."""
    texts: dict[int, list[GeneratedToken]] = defaultdict(list)

    async def finish(sequence: TextSequence) -> None:
        while not sequence.is_finished:
            await sequence.ask()
            for token in sequence.choose():
                texts[token.index].append(token)
        bar.update(num_texts // len(sequences))

    await together(map(finish, sequences))
    scores = {number: score for sequence in sequences for number, score in sequence.scores.items()}
    return [
        Generation.of_tokens(tokens, score=scores.get(number))
        for number, tokens in sorted(texts.items())
    ]


def _checked(lm: AsyncLM, prompts: list[Any], config: GenerationConfig, many: bool) -> list[Prompt]:
    """Encode and check prompts; build the configuration's constraint once for all of them."""
    checked: list[Prompt] = []
    for number, prompt in enumerate(prompts):
        try:
            own = Prompt.from_prompt(lm, prompt, config)
        except (ContextError, ContextTypeError) as error:
            if not many:
                raise
            raise type(error)(f"prompt[{number}]: {error}") from error
        if checked:
            own = dataclasses.replace(own, constraint=checked[0].constraint)
        checked.append(own)
        config = config.replace(response_format=None)
    return checked


def _with_length(config: GenerationConfig) -> tuple[bool, GenerationConfig]:
    """Return whether the text is bounded, and the configuration, with a default length if not."""
    # A ``response_format`` ends the text, so the default of 20 tokens does not apply.
    lengths = config.max_new_tokens, config.max_length, config.response_format
    if lengths != (None, None, None):
        return True, config
    return False, config.replace(max_new_tokens=DEFAULT_MAX_NEW_TOKENS)


def _warning_of_cuts(is_given: bool, ends: Sequence[Generation | GeneratedToken]) -> str:
    """Return the warning about texts that the default length cut off; ``""`` if there are none."""
    num_cut = sum(end.finish_reason == "length" for end in ends)
    if is_given or not num_cut:
        return ""
    texts = "the text was" if len(ends) == 1 else f"{num_cut} of {len(ends)} texts were"
    return (
        f"{texts} cut off after {DEFAULT_MAX_NEW_TOKENS} tokens, the default: pass max_new_tokens"
    )


def make_config(config: GenerationConfig | None, fields: dict[str, Any]) -> GenerationConfig:
    if config is not None and not isinstance(config, GenerationConfig):
        is_theirs = hasattr(config, "to_diff_dict")
        hint = " of transformers: convert it with GenerationConfig.from_hf" if is_theirs else ""
        raise GenerationConfigError(
            f"config must be a GenerationConfig, got {type(config).__name__}{hint}"
        )
    config = config or GenerationConfig()
    return config.replace(**fields) if fields else config


def make_sequences(
    lm: AsyncLM, prompt: Prompt, config: GenerationConfig, stream: int = 0
) -> list[TextSequence]:
    """Return one ``BeamSearch``, or ``n`` ``Sample``s with random streams from ``stream`` on."""
    if config.num_beams > 1:
        return [BeamSearch(lm, prompt, config)]
    return [Sample(lm, prompt, config, number, stream + number) for number in range(config.n)]


def check_streamable(config: GenerationConfig) -> None:
    for name in ("n", "num_beams"):
        if getattr(config, name) != 1:
            raise GenerationConfigError(f"{name} must be 1 to stream, got {getattr(config, name)}")
