"""VLLMEngine: runs sessions (for rows), texts to score and completions (for samples) in vLLM.

A session is a request that stays in vLLM after its row (the next-token log-probabilities) has been
computed. The core is the part of vLLM that runs requests, in this process or another.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from pydantic import ValidationError
from vllm import LLM, EngineArgs, SamplingParams
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from genlm_backend.backends.vllm import capture, fork, release
from genlm_backend.backends.vllm.completion import Completion
from genlm_backend.backends.vllm.session_planner import Scored
from genlm_backend.backends.vllm.sessions import Placement
from genlm_backend.backends.vllm.vllm_picture_reader import features_of
from genlm_backend.checks import near_names, shown
from genlm_backend.errors import (
    AdapterError,
    EngineDiedError,
    EvaluationError,
    OptionError,
    OptionTypeError,
    UnsupportedModelError,
)
from genlm_backend.multimodal.pictures import Pictures
from genlm_backend.queries.query import Adapter, RowQuery
from genlm_backend.readouts.readout import RowQueries
from genlm_backend.readouts.score_query import ScoreQuery

_WAIT = 0.1
"""Maximum seconds that a step waits for the outputs of a core in another process."""

_MOST_EMPTY_STEPS = 3
"""Consecutive steps that compute nothing, after which a session is ended to make room."""

_PATIENCE = 30.0
"""Maximum seconds to wait for a core to report that requests have ended."""


@final
class VLLMEngine:
    """Starts, extends and ends sessions, and steps vLLM; only one thread at a time may call it."""

    _here: VLLMEngine | None = None
    """The engine whose core is in this process; vLLM allows one."""

    def __init__(self, llm: LLM, tokenizer: Any = None, max_adapters: int | None = None) -> None:
        self._llm: LLM | None = llm
        self._core = capture.Core(llm)
        self._tokenizer = tokenizer
        self._pictures = capture.PictureProcessing(llm)
        self.image_token_id = self._pictures.image_token_id
        self._features: WeakKeyDictionary[Pictures, list[Any]] = WeakKeyDictionary()
        self.eos_token_ids = self._core.eos_token_ids
        self.vocab_size: int = self._core.vocab_size
        self.max_length: int = self._core.max_model_len - 1
        self.max_sessions: int = self._core.max_num_seqs
        self.block_size: int = self._core.block_size
        self.num_blocks: int = self._core.num_blocks - 1  # vLLM keeps one for itself
        self.kv_cache_dtype: str | None = self._core.kv_cache_dtype
        # With LoRA enabled, vLLM's output layer has adapter indices only for sampled tokens, but a
        # text to score needs them for every token: on the CPU the engine dies. So use rows.
        self.scores_texts = not self._core.takes_adapters
        self.num_steps = 0
        self.has_died = False
        self.completions: dict[str, Completion] = {}
        self._sessions: set[str] = set()
        self._untaken: set[str] = set()
        self._texts: dict[str, ScoreQuery] = {}
        self._requests: list[Any] = []
        self._num_empty_steps = 0
        self._adapters: dict[Adapter, LoRARequest] = {}
        self._max_adapters = max_adapters
        if self._core.is_local:
            VLLMEngine._here = self

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model's token ids; vLLM's own unless the constructor got one."""
        if self._tokenizer is None:
            assert self._llm is not None, "the engine has been closed"
            self._tokenizer = self._llm.get_tokenizer()
        return self._tokenizer

    @property
    def processor(self) -> Any:
        """The transformers processor with which vLLM reads pictures."""
        return self._pictures.processor

    def read(self, prompt: str | list[int], images: list[Any]) -> tuple[list[int], list[Any]]:
        """Return the token ids of a prompt with pictures, and the features for its requests.

        Each feature has its picture's digest (``identifier``) and the position of its tokens
        (``mm_position``, with an ``offset`` and a ``length``).
        """
        return self._pictures.read(prompt, images)

    @classmethod
    def load(cls, path: str, options: dict[str, Any], tokenizer: Any = None) -> VLLMEngine:
        """Load a model with vLLM, in this process or, if necessary, in a process of its own."""
        _check_options(options)
        made, max_adapters = _arguments(options), None
        if made.get("enable_lora"):
            # While one adapter replaces another of the same name, each needs a slot: vLLM would
            # reload an adapter without a slot from its files, which may have changed.
            num_places = made.get("max_loras", 1)
            if current_platform.is_cpu():
                # On the CPU a request without an adapter uses the last slot's adapter (vLLM issue
                # 48421), so an extra last slot stays empty; a second one is for a replacement.
                max_adapters, num_places = num_places, num_places + 2
                made["max_loras"] = num_places
            made["max_cpu_loras"] = max(made.get("max_cpu_loras") or 0, num_places) + 1
        is_taken = VLLMEngine._here is not None
        is_apart = (
            is_taken
            or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1"
            or any(options.get(name, 1) != 1 for name in _PARALLEL)
            or options.get("distributed_executor_backend") not in (None, "uni")
        )
        # Set the variables only while vLLM loads. They select vLLM's first model runner by default,
        # because it has been tested. vLLM seeds the global generators, so restore their states.
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if is_apart else "0"}
        variables |= {name: os.environ.get(name, own) for name, own in _DEFAULT_ENVIRONMENT.items()}
        with environment(variables), random_state_kept():
            # An engine in this process makes vLLM cache the variables; read them again.
            capture.envs.disable_envs_cache()
            release.let_modules_be_scanned()
            try:
                with _values_explained():
                    _check_model(path, made)
                    llm = LLM(path, **made)
            finally:
                if is_taken:  # restored for the first engine, which still runs here
                    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
                    capture.envs.enable_envs_cache()
        return cls(llm, tokenizer, max_adapters)

    # ---------------------------------------------------------------- sessions

    def num_free_blocks(self) -> int:
        """Return how many blocks of keys and values are free once ended requests are gone."""
        self._wait_for_ends()
        return self._core.num_free_blocks

    def add(self, placement: Placement) -> None:
        """Keep a request that starts or extends a placement's session; ``run`` sends it to vLLM."""
        session, query = placement.session, placement.query
        extra = {capture.TAG: session, **_fork_of(placement.source, placement.num_shared)}
        params = SamplingParams(**_OF_A_ROW, extra_args=extra)
        self._sessions.add(session)
        self._untaken.add(session)
        self._requests.append(
            self._request(session, query, placement.num_extended, params, resumable=True)
        )

    def run(
        self, session_ids: list[str], relieve: Callable[[], bool], wanted: RowQueries | None = None
    ) -> dict[str, Any]:
        """Step until each session has a row or no room is left; return rows or readouts by id."""
        requests, self._requests = self._requests, []
        self._call(self._core.add, requests)
        waiting = set(session_ids)
        self._num_empty_steps = 0
        while waiting:
            for output in self._step():
                if output.request_id not in waiting:
                    continue
                if _has_failed(output.finish_reason):
                    raise EvaluationError(f"vLLM ended a session: {output.finish_reason}")
                if output.new_token_ids:
                    waiting.discard(output.request_id)
            # Once the engine has no room for any request, ``relieve`` ends an idle session, if any.
            if waiting and not self._is_relieved(relieve):
                break
        places = [i for i, session in enumerate(session_ids) if session not in waiting]
        if not places:
            return {}
        computed = [session_ids[i] for i in places]
        own = None if wanted is None else wanted.of(places)
        found = self._call(self._core.take_rows, computed, own)
        self._untaken.difference_update(computed)
        return dict(zip(computed, found, strict=True))

    def score(self, texts: list[ScoreQuery], relieve: Callable[[], bool]) -> list[Scored]:
        """Return texts' scores by ``prompt_logprobs``; ``relieve`` ends a session to make room."""
        found = self._scored(texts, relieve, is_fresh=False)
        # vLLM computes no logits of cached tokens, so rerun texts with cached targets uncached.
        again = [i for i, each in enumerate(found) if not each.is_whole]
        if again:
            fresh = self._scored([texts[i] for i in again], relieve, is_fresh=True)
            for i, each in zip(again, fresh, strict=True):
                found[i] = each
        return found

    def _scored(
        self, texts: list[ScoreQuery], relieve: Callable[[], bool], is_fresh: bool
    ) -> list[Scored]:
        params = SamplingParams(**_OF_A_ROW, prompt_logprobs=0, skip_reading_prefix_cache=is_fresh)
        waiting = self._texts = {uuid.uuid4().hex: text for text in texts}
        found, names = dict[str, Scored](), list(waiting)
        requests = [
            self._request(name, text.text, 0, params, resumable=False)
            for name, text in waiting.items()
        ]
        self._num_empty_steps = 0
        try:
            self._call(self._core.add, requests)
            while waiting:
                for output in self._step():
                    if output.request_id not in waiting:
                        continue
                    if _has_failed(output.finish_reason):
                        raise EvaluationError(f"vLLM ended a text to score: {output.finish_reason}")
                    if output.finish_reason is not None:
                        text = waiting.pop(output.request_id)
                        found[output.request_id] = self._scored_text(output, text)
                if waiting and not self._is_relieved(relieve):
                    raise EvaluationError(
                        f"vLLM has no room for {len(waiting)} of the texts to score"
                    )
        finally:
            self._texts = {}
            if waiting:
                self._call(self._core.abort, list(waiting))
        return [found[name] for name in names]

    def _scored_text(self, output: Any, text: ScoreQuery) -> Scored:
        logprobs, ids, num_computed, num_reused = self._core.logprobs_of(output)
        # A preempted text may resume after cached targets, with wrong ids there: compare ids too.
        targets = torch.tensor(text.targets, dtype=torch.int64)
        is_whole = num_reused < text.start and torch.equal(ids[text.start - 1 :], targets)
        return Scored(logprobs[text.start - 1 :].clone(), num_computed, num_reused, is_whole)

    def end(self, session_ids: list[str]) -> None:
        """End sessions, computed or not; a local core frees blocks at once, a remote one later."""
        if session_ids:
            self._requests = [r for r in self._requests if r.request_id not in session_ids]
            self._sessions.difference_update(session_ids)
            self._call(self._core.abort, session_ids)
            if untaken := self._untaken.intersection(session_ids):
                self._untaken -= untaken
                self._call(self._core.forget_logits, list(untaken))

    def reset(self) -> None:
        """Wait until ended requests are gone; empty the KV cache, so completions are recomputed."""
        self._wait_for_ends()
        self._call(self._core.reset)

    # ---------------------------------------------------------------- completions

    def start(
        self,
        completion: Completion,
        forbidden: frozenset[int],
        source: str | None = None,
        num_shared: int = 0,
    ) -> None:
        """Begin a completion, which may fork the first ``num_shared`` tokens of session ``source``.

        Later steps advance it.
        """
        params = SamplingParams(
            max_tokens=completion.num_possible,
            temperature=min(completion.temperature, 1e30),  # an infinite one would give NaN
            seed=completion.seed,
            stop_token_ids=sorted(completion.eos_token_ids),
            allowed_token_ids=[i for i in range(self.vocab_size) if i not in forbidden]
            if forbidden
            else None,
            detokenize=False,
            ignore_eos=True,
            extra_args=_fork_of(source, num_shared),
        )
        self.completions[completion.id] = completion
        query = completion.prompt
        request = self._request(completion.id, query, 0, params, resumable=False)
        self._call(self._core.add, [request])

    def step(self, relieve: Callable[[], bool]) -> None:
        """Step the completions; raise an ``EvaluationError`` if no room can be made for them."""
        self._step()
        if self.completions and not self._is_relieved(relieve):
            raise EvaluationError(f"vLLM has no room for any of {len(self.completions)} samples")

    def stop(self, completions: list[Completion]) -> None:
        """Abort completions; their futures stay unsettled."""
        for completion in completions:
            del self.completions[completion.id]
        self._call(self._core.abort, [completion.id for completion in completions])

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        if not self._core.takes_adapters:
            raise AdapterError(
                f"the model was loaded without support for adapters: {adapter.name!r} needs "
                f"engine_opts={{'enable_lora': True}}"
            )
        num_others = len(self._adapters) - any(a.name == adapter.name for a in self._adapters)
        if self._max_adapters is not None and num_others >= self._max_adapters:
            raise AdapterError(
                f"vLLM on the CPU holds only max_loras={self._max_adapters} adapters: load the "
                f"model with a larger max_loras to add {adapter.name!r}"
            )
        # vLLM keys cached blocks by name and path, so an adapter's replacement needs a new name.
        request = LoRARequest(f"{adapter.name} {adapter.number}", adapter.number, path)
        try:
            self._call(self._core.add_lora, request)
        except EngineDiedError:
            raise
        except Exception as error:
            raise AdapterError(f"vLLM cannot load the adapter {adapter.name!r}: {error}") from error
        self._adapters[adapter] = request

    def remove_adapter(self, adapter: Adapter) -> None:
        """Remove a LoRA adapter; no session or completion may still use it."""
        self._call(self._core.remove_lora, self._adapters.pop(adapter).lora_int_id)

    # ---------------------------------------------------------------- closing

    def close(self) -> None:
        """Shut vLLM down and free its memory; a second call has no effect."""
        if self._llm is None:
            return
        try:
            self._core.shutdown()
        finally:
            if VLLMEngine._here is self:
                VLLMEngine._here = None
            self._llm = None
            del self._core
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    # ---------------------------------------------------------------- one step

    @property
    def _num_requests(self) -> int:
        return len(self._sessions) + len(self.completions) + len(self._texts)

    def _is_relieved(self, relieve: Callable[[], bool]) -> bool:
        """Return whether to step again: few steps in a row were empty, or ``relieve`` made room."""
        if self._num_empty_steps < _MOST_EMPTY_STEPS:
            return True
        self._num_empty_steps = 0
        return relieve()

    def _step(self) -> list[Any]:
        """Run a step, or await a remote one for ``_WAIT`` s; extend completions; return outputs."""
        gone = [c for c in self.completions.values() if c.future.cancelled()]
        if gone:
            self.stop(gone)
        outputs = self._call(self._core.step, _WAIT)
        if outputs is None:
            return []
        is_empty = not outputs and self._core.is_fresh and self._core.num_running == 0
        self.num_steps += not is_empty
        if not is_empty:
            self._num_empty_steps = 0
        elif self._core.num_requests == self._num_requests:
            # The counts differ if another process reported the step before it received the latest
            # requests or aborts.
            self._num_empty_steps += 1
        for output in outputs:
            completion = self.completions.get(output.request_id)
            if completion is not None:
                reason = output.finish_reason
                if reason is not None:
                    del self.completions[output.request_id]
                if _has_failed(reason):
                    completion.fail(EvaluationError(f"vLLM ended a sample: {reason}"))
                else:
                    completion.extend(output.new_token_ids, is_finished=reason is not None)
        return outputs

    def _wait_for_ends(self) -> None:
        """Wait until a core in another process reports that ended requests are gone."""
        if self._core.is_local or self._core.num_requests <= self._num_requests:
            return
        deadline = time.monotonic() + _PATIENCE
        while self._core.num_requests > self._num_requests:
            self._step()
            if time.monotonic() > deadline:
                raise EvaluationError(f"vLLM did not end requests within {_PATIENCE:.0f} s")
        self._num_empty_steps = 0

    def _request(self, name: str, query: RowQuery, start: int, params: Any, resumable: bool) -> Any:
        """Return a request for a context's tokens from position ``start`` on."""
        lora = None if query.adapter is None else self._adapters[query.adapter]
        pictures, ids, features = query.context.pictures, list(query.context.packed(start)), None
        if pictures is not None and start < pictures.num_tokens:
            kept = self._features.get(pictures)
            if kept is None:
                kept = self._features[pictures] = features_of(pictures)
            features = self._pictures.between(kept, start, pictures.num_tokens, lora)
            ids = pictures.shown(query.context.packed(start))
        return capture.core_request(
            request_id=name,
            prompt_token_ids=ids,
            mm_features=features,
            sampling_params=params,
            lora_request=lora,
            resumable=resumable,
        )

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            if not (isinstance(error, capture.EngineDeadError) or self._core.is_dead):
                raise
            # Another thread closes a dead core's sockets, so a write to them may raise any error.
            self.has_died = True
            raise EngineDiedError(
                "vLLM's engine has died: see its output for the cause, then close this model and "
                "load it again"
            ) from error.with_traceback(None)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise an error for an option unknown to vLLM, or a value unsupported by this backend."""
    known = {field.name for field in fields(EngineArgs)} | {*inspect.signature(LLM).parameters}
    for name in options:
        if name not in known:
            raise OptionTypeError(f"vLLM has no option {name!r}{near_names(name, known)}")
    for name, why in _REFUSED.items():
        if options.get(name) not in (None, 1):
            raise UnsupportedModelError(f"{name}={options[name]!r}: {why}")
    kept = options.get("kv_cache_dtype", "auto")
    if current_platform.is_cpu() and kept not in capture.KV_CACHE_DTYPES_ON_CPU:
        known = ", ".join(map(repr, capture.KV_CACHE_DTYPES_ON_CPU))
        raise UnsupportedModelError(
            f"kv_cache_dtype={kept!r}: vLLM accepts it on the CPU, but returns wrong rows; "
            f"vLLM's attention on the CPU supports {known}"
        )


@contextlib.contextmanager
def _values_explained() -> Iterator[None]:
    """Turn pydantic's errors for vLLM's options into an ``OptionError`` that names the options."""
    try:
        yield
    except ValidationError as error:
        wrong = dict[str, str]()  # a field of several types has an error for each type
        for one in error.errors(include_url=False):
            name = f"{one['loc'][0]}={shown(one['input'])}: " if one["loc"] else ""
            wrong.setdefault(name, one["msg"].removeprefix("Value error, "))
        told = "; ".join(name + why for name, why in wrong.items())
        raise OptionError(f"vLLM rejects engine_opts: {told}") from error


def _check_model(path: str, arguments: Mapping[str, Any]) -> None:
    """Raise an error, before weights are loaded, if a model's config implies recurrent states."""
    own = {field.name for field in fields(EngineArgs)}  # vllm.LLM takes others too
    given = {name: value for name, value in arguments.items() if name in own}
    if given.get("hf_overrides", {}) is None:  # ``None``, which only vllm.LLM accepts
        del given["hf_overrides"]
    # Drop vLLM's messages here: it configures its logger later, and logs them again.
    log, nobody = logging.getLogger("vllm"), logging.NullHandler()
    log.addHandler(nobody)
    try:
        config = EngineArgs(model=path, **given).create_model_config()
    finally:
        log.removeHandler(nobody)
    if config.is_hybrid or config.is_attention_free:
        raise UnsupportedModelError(
            f"{config.architecture} has recurrent states, which vLLM does not keep after each "
            "token, so its contexts cannot be forked: use load_model_by_name(…, backend='hf')"
        )


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``vllm.LLM`` arguments: the options, and those that sessions and rows need."""
    return {
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.9,
        "disable_hybrid_kv_cache_manager": True,  # ForkConnector needs one group of layers
        **options,
        "disable_log_stats": False,  # the statistics report the free blocks
        "async_scheduling": False,
        "mm_processor_cache_gb": 0,  # with a cache, later requests would omit features
        "logits_processors": [*(options.get("logits_processors") or ()), capture.RowCapture],
        "worker_extension_cls": f"{capture.__name__}.{capture.RowExtension.__name__}",
        "kv_transfer_config": KVTransferConfig(
            kv_connector=fork.ForkConnector.__name__,
            kv_role="kv_both",
            kv_connector_module_path=fork.__name__,
        ),
    }


def _fork_of(source: str | None, num_shared: int) -> dict[str, Any]:
    """Return the ``extra_args`` of a request that forks ``source``; none without a source."""
    if source is None:
        return {}
    return {"kv_transfer_params": {fork.SOURCE: source, fork.NUM_SHARED: num_shared}}


def _has_failed(finish_reason: Any) -> bool:
    """Return whether a request ended other than by an end token or its length."""
    return finish_reason is not None and str(finish_reason) not in ("stop", "length")


_OF_A_ROW: Any = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "ignore_eos": True}
"""Sampling parameters of requests for rows or scores; their one sampled token is discarded."""

_REFUSED = {
    "data_parallel_size": "sessions need a single engine; load a model for each replica instead",
    "speculative_config": "drafted tokens get no rows",
    "enable_prefix_caching": "sessions share blocks by prefix caching",
}


_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")

_DEFAULT_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_V2_MODEL_RUNNER": "0"}


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the ``with`` block, and restore them after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """After the ``with`` block, restore the random states of Python, NumPy and torch (CPU)."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
