"""Model ``genlm`` for lm-evaluation-harness: any ``AsyncLM`` can run the harness's tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import torch

from genlm_backend.backends.registry import check_loading, load_model_by_name
from genlm_backend.checks import (
    integer,
    loading_option_names,
    mapping,
    optional,
    shown,
    switch,
    text,
)
from genlm_backend.errors import ContextError, MissingExtraError, OptionError, OptionTypeError
from genlm_backend.generation.config import GenerationConfig
from genlm_backend.generation.generation import generate
from genlm_backend.model.async_lm import AsyncLM
from genlm_backend.runtime.background_loop import BackgroundLoop
from genlm_backend.runtime.progress import progress_bar
from genlm_backend.runtime.together import together
from genlm_backend.scoring.words import default_beginning
from genlm_backend.tokenization.bos import adds_bos

try:
    # Import the harness's models first: the harness does so only while its registry is empty.
    import lm_eval.models  # noqa: F401 # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models import utils as model_utils  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )
except ImportError as error:
    raise MissingExtraError(
        "evaluations need lm-evaluation-harness: pip install 'genlm-backend[lm-eval]'"
    ) from error

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 512
"""Continuations that one call scores, at most; the progress bar is updated after each call."""

_UNBOUNDED: Final = 2048
"""Context window, in tokens, assumed if a model has no maximum, as in the harness's models."""

_OF_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p")


class _Asked(NamedTuple):
    prompt: list[int]
    config: GenerationConfig
    until: list[str]


@register_model("genlm")
@final
class HarnessLM(TemplateLM):
    """A model of lm-evaluation-harness that runs on an ``AsyncLM``.

    Importing this module registers the class as ``genlm``. Texts are tokenized, and contexts are
    truncated from the left, as in the harness's transformers model (``hf``). So log-likelihoods
    and greedy texts agree with that model's up to rounding. Prefixes that requests share, such as
    few-shot examples, are computed once if the model caches keys and values.

    Args:
        pretrained: A name that ``load_model_by_name`` takes, or an ``AsyncLM``.
        backend: The backend; see ``load_model_by_name``.
        batch_size: Distinct contexts in a batch, at most. 1 (the harness's default) and ``"auto"``
            keep the model's default.
        max_batch_size: Upper bound of the harness's search for a batch size; ignored.
        device: The device, for models of transformers; other backends ignore it. The harness
            passes ``"cuda:0"`` by default, so a CUDA device is ignored if torch has none. An
            ``AsyncLM`` keeps its device and its batch size.
        max_gen_toks: Tokens of a generated text, at most, if its task sets no limit.
        add_bos_token: Whether texts begin with ``bos_token_id``; ``None`` leaves it to the
            tokenizer.
        prefix_token_id: The token before texts without a context; by default the tokenizer's
            ``bos_token_id``, or else its ``eos_token_id``.
        peft: A LoRA adapter to evaluate with; see ``add_new_lora``.
        chat_template_args: More arguments for the tokenizer's chat template.
        enable_thinking: The argument ``enable_thinking`` of the chat template.
        think_end_token: A string that ends a model's reasoning; only the part of a generated text
            after its last occurrence counts.
        **llm_opts: Options of ``load_model_by_name`` by name. An option of the backend's library,
            such as ``dtype`` in ``hf_opts``, may be given directly.

    Attributes:
        lm: The model.
        tokenizer: The model's tokenizer.

    Raises:
        OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type.
        OptionError: (``ValueError``) If an option is out of its bounds, the tokenizer is not one of
            transformers, or the tokenizer names no token that can begin a text.
        Exception: Any error of ``load_model_by_name``.
    """

    def __init__(
        self,
        pretrained: str | AsyncLM,
        backend: str | None = None,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        peft: str | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        **llm_opts: Any,
    ) -> None:
        super().__init__()
        self._max_gen_toks = integer(1)("max_gen_toks", max_gen_toks)
        self._add_bos_token = optional(switch)("add_bos_token", add_bos_token)
        self._chat_options = {**(optional(mapping)("chat_template_args", chat_template_args) or {})}
        if enable_thinking is not None:
            self._chat_options["enable_thinking"] = switch("enable_thinking", enable_thinking)
        self._think_end_token = optional(text)("think_end_token", think_end_token)
        optional(text)("peft", peft)
        if isinstance(pretrained, AsyncLM):
            for name in (*llm_opts, *(["backend"] if backend is not None else ())):
                raise OptionTypeError(f"{name} is for a model loaded by name, not for an AsyncLM")
            self.lm = pretrained
        else:
            opts = {**llm_opts, **_batch_options(batch_size)}
            self.lm = _loaded(pretrained, backend, opts, device)
        self.tokenizer = self.lm.tokenizer
        self._prefix_token_id = self._checked_prefix(prefix_token_id)
        self._begins_by_default = (
            prefix_token_id is None and self.tokenizer.bos_token_id is not None
        )
        self._prefix: str = self.tokenizer.decode(self._prefix_token_id)
        self._begin = self._missing_begin() if add_bos_token else []
        self._lora_name = None if peft is None else "peft"
        if peft is not None:
            self.lm.add_new_lora(peft, "peft")

    def _checked_prefix(self, given: int | None) -> int:
        if not hasattr(self.tokenizer, "bos_token_id"):
            raise OptionError(
                f"the model must have a transformers tokenizer, got {type(self.tokenizer).__name__}"
            )
        named = (given, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        known = [token_id for token_id in named if token_id is not None]
        if not known:
            raise OptionError("prefix_token_id must be given: the tokenizer has no BOS and no EOS")
        return integer(0, len(self.lm.byte_vocab) - 1)("prefix_token_id", known[0])

    def _missing_begin(self) -> list[int]:
        """Return the BOS in a list, or an empty list if the tokenizer adds it itself."""
        begin = self.tokenizer.bos_token_id
        if begin is None:
            raise OptionError("add_bos_token=True needs a BOS, and the tokenizer has none")
        return [] if adds_bos(self.tokenizer) else [begin]

    # ---------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before texts without context; ``default_beginning`` may warn about it."""
        if self._begins_by_default:
            return default_beginning(self.lm, "prefix_token_id")
        return self._prefix_token_id

    @property
    def max_length(self) -> int:
        return self.lm.max_length or _UNBOUNDED

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, by which the harness caches prepared requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **others: Any
    ) -> list[int]:
        """Return a text's token ids; ``add_special_tokens`` defaults to ``add_bos_token``."""
        if add_special_tokens is None:
            # A text that already begins with the prefix token's text gets no special tokens.
            begins = string.startswith(self._prefix)
            add_special_tokens = False if begins else self._add_bos_token
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids = list(self.tokenizer.encode(string, **options))
        return [*self._begin, *ids] if add_special_tokens else ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a chat; if the template refuses it, try again without system messages."""
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._chat_options,
        }
        try:
            return self.tokenizer.apply_chat_template(chat_history, **options)
        except Exception:  # a template may raise anything
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            _log.warning("the chat template rejects a chat: trying it without system messages")
            return self.tokenizer.apply_chat_template(others, **options)

    # ---------------------------------------------------------------- log-likelihoods

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **others: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        found: dict[int, tuple[float, bool]] = {}
        for i, answer in self._scored(pairs, not disable_tqdm):
            found[i] = answer
            self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return [found[i] for i in range(len(pairs))]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in nats, after the prefix token."""
        pairs, owners = list[tuple[list[int], list[int]]](), list[int]()
        for owner, request in enumerate(requests):
            # As in the harness's own models, windows of a long text overlap by one token.
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [make_disjoint_window(window) for window in windows]
            pairs += own
            owners += [owner] * len(own)
        parts: list[list[float]] = [[] for _ in requests]
        for i, (logprob, _) in self._scored(pairs, not disable_tqdm):
            parts[owners[i]].append(logprob)
        sums = [math.fsum(own) for own in parts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _scored(
        self, pairs: Sequence[tuple[list[int], list[int]]], is_shown: bool
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yield each pair's index and (log-likelihood, whether the continuation is greedy)."""
        cut = [self._cut(context, continuation) for context, continuation in pairs]
        # In sorted order, neighbours share the longest prefixes while these are still cached.
        order = sorted(range(len(cut)), key=lambda i: cut[i][0] + cut[i][1])
        with progress_bar(len(cut), is_shown, "scoring") as bar:
            for start in range(0, len(order), _AT_ONCE):
                some = order[start : start + _AT_ONCE]
                prompts, continuations = [cut[i][0] for i in some], [cut[i][1] for i in some]
                scores = self.lm.batch_score_with_sync(
                    prompts, continuations, self._lora_name, rank=True
                )
                for i, own in zip(some, scores, strict=True):
                    assert own.ranks is not None
                    is_greedy = not own.ranks.any().item()
                    yield i, (math.fsum(own.logprobs.tolist()), is_greedy)
                bar.update(len(some))

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Return context and continuation; the context is cut on the left so that both fit."""
        if not 0 < len(continuation) <= self.max_length:
            raise ContextError(
                f"a continuation must have 1 to {self.max_length} tokens, got {len(continuation)}: "
                f"{shown(self.tokenizer.decode(continuation))}"
            )
        # The continuation's last token is never evaluated, so one more token fits.
        most = self.max_length + 1 - len(continuation)
        if len(context) > most:
            _log.warning("a context of %d tokens is truncated to its last %d", len(context), most)
        return context[-most:], continuation

    # ---------------------------------------------------------------- texts

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return a generated text for each request; greedy unless the task asks for sampling."""
        asked = [self._asked(*request.args) for request in requests]
        with (
            contextlib.closing(BackgroundLoop("lm-eval")) as loop,
            progress_bar(len(asked), not disable_tqdm, "generating") as bar,
        ):
            return loop.run(self._texts(requests, asked, bar))

    async def _texts(self, requests: Any, asked: Sequence[_Asked], bar: Any) -> list[str]:
        # Further texts would not fit into a batch, but would take space in the KV cache.
        places = asyncio.Semaphore(self.lm.batch_size)

        async def finished(request: Any, own: _Asked) -> str:
            async with places:
                (generation,) = await generate(self.lm, own.prompt, own.config)
            text = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
            text = model_utils.postprocess_generated_text(text, own.until, self._think_end_token)
            self.cache_hook.add_partial("generate_until", request.args, text)
            bar.update()
            return text

        return await together(map(finished, requests, asked))

    def _asked(self, context: str, arguments: Mapping[str, Any]) -> _Asked:
        """Convert a task's context and generation arguments to a prompt and a configuration."""
        fields = dict(model_utils.normalize_gen_kwargs({**arguments}, self._max_gen_toks))
        max_new_tokens = fields.pop("max_gen_toks")
        eos = [] if self.eot_token_id is None else [self.tokenizer.decode(self.eot_token_id)]
        until = [end for end in [*fields.pop("until"), *eos] if end]
        most = self.max_length - max_new_tokens
        if most < 1:
            raise OptionError(
                f"max_gen_toks must be below {self.max_length}, the model's maximum length, so "
                f"that a context fits; got {max_new_tokens}"
            )
        if not fields["do_sample"]:
            for name in _OF_SAMPLING:
                fields.pop(name, None)
        elif "seed" not in fields:  # draw one from torch's generator, which the harness seeds
            fields["seed"] = int(torch.randint(1 << 62, (), dtype=torch.int64))
        # Generated text has no special tokens, so match strings that contain some by ids too.
        ends = {end: self.tok_encode(end, add_special_tokens=False) for end in until}
        special = [ids for ids in ends.values() if not self.lm.special_ids.isdisjoint(ids)]
        config = GenerationConfig(
            **fields,
            max_new_tokens=max_new_tokens,
            stop=until,
            stop_words_ids=special,
            lora_name=self._lora_name,
        )
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        return _Asked(prompt[-most:], config, until)


def _batch_options(batch_size: int | str | None) -> dict[str, Any]:
    """Return the loading options that set ``batch_size``: none for ``None``, 1 and "auto"."""
    if batch_size in (None, 1, "1") or str(batch_size).startswith("auto"):
        return {}
    if isinstance(batch_size, str) and batch_size.isdecimal():
        batch_size = int(batch_size)
    return {"batch_size": batch_size}


def _loaded(
    pretrained: str, backend: str | None, options: dict[str, Any], device: str | None
) -> AsyncLM:
    """Load a model; options that its backend does not know go to the backend's library, if any."""
    kind, _ = check_loading(
        pretrained, backend, {n: v for n, v in options.items() if n == "replicas"}
    )
    library, known = kind.library_opts, loading_option_names(kind)
    given = {n: value for n, value in options.items() if n in known or not library}
    inner = {n: value for n, value in options.items() if n not in given}
    is_default = str(device).startswith("cuda") and not torch.cuda.is_available()
    if device is not None and not is_default and library == "hf_opts":
        inner.setdefault("device_map", device)
    if inner:
        given[library] = {**inner, **mapping(library, given.get(library, {}))}
    return load_model_by_name(pretrained, backend, given)


def run(arguments: Sequence[str]) -> None:
    """Run the harness's command line with the model ``genlm`` registered."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    sys.argv = ["lm-eval", *arguments]
    cli_evaluate()
