"""Every public callable, where its options are declared, and arguments that are right."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from genlm_backend import (
    AsyncGLM,
    AsyncReplicas,
    AsyncTokenCharacterTrie,
    AsyncTransformer,
    AsyncVirtualLM,
    Constraint,
    Engine,
    GenerationConfig,
    MockAsyncLM,
    MultiMediaInfo,
    ParallelTokenCharacterTrie,
    ParticleGroup,
    Token,
    TokenCharacterTrie,
    batched,
    continuations,
    continuations_sync,
    decode_vocab,
    generate,
    generate_sync,
    lm_trie_weights,
    load_model_by_name,
    prefix_logprob,
    prefix_logprob_sync,
    smc,
    smc_sync,
    stream,
    surprisal,
    surprisal_sync,
)
from genlm_backend.backends.mock import MockEvaluator
from genlm_backend.batching import Batcher, BatchPolicy
from genlm_backend.compat.output_cache import OutputCache
from genlm_backend.errors import ModelNotFoundError, UnknownTaskError
from genlm_backend.generation import RuntimeConfig
from genlm_backend.generation.async_glm import HONOURED
from genlm_backend.model.batched_lm import BatchedLM
from genlm_backend.queries.row import RowCache
from genlm_backend.readouts.sampling import Sampler
from genlm_backend.scoring.surprisals import SurprisalOptions
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.vllm.fake import FakeEngine

VOCAB = [Token(0, b"a"), Token(1, b"ab"), Token(2, b"b"), Token(3, b"")]


@dataclass
class Subject:
    """A callable, where its options are declared, and arguments that are right."""

    call: Callable[..., Any]
    given: dict[str, Any] = field(default_factory=dict)
    declared: tuple[Callable[..., Any], ...] = ()
    names: tuple[str, ...] = ()
    accepting: tuple[type[Exception], ...] = ()
    """What it raises for arguments that are right."""

    def options(self) -> list[str]:
        if self.names:
            return list(self.names)
        found: dict[str, None] = {}
        for place in self.declared or (self.call,):
            for parameter in inspect.signature(place).parameters.values():
                is_named = parameter.kind in (
                    parameter.POSITIONAL_OR_KEYWORD,
                    parameter.KEYWORD_ONLY,
                )
                if is_named and parameter.name != "self":
                    found[parameter.name] = None
        return list(found)


MODEL = families.make("llama")
LM = MockAsyncLM(word_tokenizer(), row_cache_bytes=0)
TEXTS = {"lm": LM, "texts": [next(iter(word_tokenizer().get_vocab()))], "context": [1]}
OPTIONS_OF_TEXTS = ("lm", "texts", *SurprisalOptions.__annotations__)
HF = AsyncTransformer(MODEL, word_tokenizer(), kv_cache_bytes=1 << 16)
VLLM = AsyncVirtualLM(FakeEngine())
TRIE = TokenCharacterTrie(VOCAB)
PARALLEL = ParallelTokenCharacterTrie(VOCAB)
ASYNC_TRIE = AsyncTokenCharacterTrie(TRIE)
LM_TRIE = TokenCharacterTrie(LM.byte_vocab)
SHARED: dict[str, Any] = {}
"""An engine that runs the mock, a request that has ended, and tasks that nobody begins."""

EOS = range(families.VOCAB)
SAMPLE = {"max_tokens": 2, "eos_token_ids": EOS}
GENERATED = {"lm": LM, "prompt": [1], "max_new_tokens": 1, "eos_token_id": [*EOS]}
SMC = {"lm": LM, "prompt": [1], "n": 2, "max_tokens": 2, "ends": [*EOS]}
BACKENDS = {"mock": LM, "hf": HF, "vllm": VLLM}
REPLICAS = [MockEvaluator(families.VOCAB) for _ in range(2)]
BACKENDS["replicas"] = AsyncReplicas(word_tokenizer(), REPLICAS)


def new_evaluators():
    return [MockEvaluator(families.VOCAB) for _ in range(2)]


def engine_method(name):
    return lambda **given: getattr(SHARED["engine"], name)(**given)


def group_method(name):
    return lambda **given: getattr(LM.particles([1], 2), name)(**given)


def glm_method(name):
    return lambda **given: getattr(SHARED["glm"], name)(**given)


SUBJECTS: dict[str, Subject] = {
    "BatchPolicy": Subject(BatchPolicy),
    "Batcher": Subject(Batcher, {"evaluate": list}, (Batcher.__init__,)),
    "batched": Subject(lambda **given: batched(**given)(list), {}, (batched,)),
    "smc": Subject(smc, SMC, names=tuple(sorted({*inspect.signature(smc).parameters} - {"twist"}))),
    "smc_sync": Subject(smc_sync, SMC, names=("twist",), accepting=(TypeError,)),  # of the twist
    "MockAsyncLM.particles": Subject(LM.particles, {"prompt": [1], "n": 2}),
    **{
        f"ParticleGroup.{name}": Subject(group_method(name), given, (getattr(ParticleGroup, name),))
        for name, given in {
            "append": {"token_ids": [1, 2]},
            "draw": {},
            "draw_sync": {},
            "finish": {"is_done": [True, False]},
            "log_masses": {"groups": [[1]]},
            "logprobs_of": {"token_ids": [1]},
            "resample": {},
            "reweight": {"log_increments": 0.0},
            "top": {"k": 1},
        }.items()
    },
    "RowCache": Subject(RowCache, {"budget": 10}),
    "OutputCache": Subject(OutputCache, {"maxsize": 3}),
    "Sampler": Subject(Sampler),
    "Token": Subject(Token, {"token_id": 1, "byte_string": b"a"}),
    "decode_vocab": Subject(decode_vocab, {"tokenizer": word_tokenizer()}),
    "MockAsyncLM": Subject(
        MockAsyncLM,
        {"tokenizer": word_tokenizer()},
        (MockAsyncLM.__init__, BatchedLM.__init__),
    ),
    "AsyncTransformer": Subject(
        AsyncTransformer,
        {"hf_model": MODEL, "hf_tokenizer": word_tokenizer(), "kv_cache_bytes": 1 << 16},
        (AsyncTransformer.__init__,),
    ),
    "AsyncReplicas": Subject(
        lambda **given: AsyncReplicas(
            **{"tokenizer": word_tokenizer(), "evaluators": new_evaluators(), **given}
        ),
        names=tuple(inspect.signature(AsyncReplicas).parameters),
    ),
    "AsyncReplicas.from_name": Subject(
        AsyncReplicas.from_name,
        {"model_id": "/no/such/model"},
        accepting=(ModelNotFoundError,),
    ),
    "AsyncVirtualLM": Subject(
        lambda **given: AsyncVirtualLM(FakeEngine(), **given),
        names=tuple(inspect.signature(AsyncVirtualLM).parameters)[1:],
    ),
    "load_model_by_name": Subject(
        load_model_by_name,
        {"name": "/no/such/model", "backend": "hf"},
        accepting=(ModelNotFoundError,),
    ),
    "AsyncTransformer.from_name": Subject(
        AsyncTransformer.from_name,
        {"model_id": "/no/such/model"},
        (AsyncTransformer.from_name,),
        accepting=(ModelNotFoundError,),
    ),
    "GenerationConfig": Subject(GenerationConfig),
    "MultiMediaInfo": Subject(MultiMediaInfo),
    "RuntimeConfig": Subject(RuntimeConfig),
    "TokenCharacterTrie": Subject(TokenCharacterTrie, {"decode": VOCAB}),
    "ParallelTokenCharacterTrie": Subject(ParallelTokenCharacterTrie, {"decode": VOCAB}),
    "AsyncTokenCharacterTrie": Subject(AsyncTokenCharacterTrie, {"trie": TRIE}),
    "AsyncTokenCharacterTrie.from_vocab": Subject(
        AsyncTokenCharacterTrie.from_vocab,
        {"vocab": VOCAB, "backend": "sequential"},
        (AsyncTokenCharacterTrie.from_vocab, TokenCharacterTrie.__init__),
        names=("vocab", "backend", "batch_size", "timeout", "num_threads", "spare_bytes"),
    ),
    "weight_sum": Subject(TRIE.weight_sum),
    "weight_sum of torch": Subject(PARALLEL.weight_sum),
    "awaited weight_sum": Subject(ASYNC_TRIE.weight_sum),
    "batch_weight_max": Subject(TRIE.batch_weight_max),
    "visualize": Subject(TRIE.visualize),
    "lm_trie_weights": Subject(lm_trie_weights, {"lm": LM, "trie": LM_TRIE, "token_ids": [1]}),
    "Engine.install_model": Subject(
        lambda **given: Engine().install_model(**given),
        {"name": "n", "model": LM},
        (Engine.install_model,),
    ),
    "Engine.install_model by name": Subject(
        lambda **given: Engine().install_model(**given),
        {"name": "n", "model": "x", "backend": "hf"},
        names=tuple(inspect.signature(RuntimeConfig).parameters),
    ),
    "Engine.model_state": Subject(engine_method("model_state"), declared=(Engine.model_state,)),
    "Engine.sync_request": Subject(
        lambda **given: SHARED["engine"].sync_request(**{"request": SHARED["request"], **given}),
        declared=(Engine.sync_request,),
    ),
    "Engine.stop_request": Subject(engine_method("stop_request"), declared=(Engine.stop_request,)),
    "get_with_timeout": Subject(
        lambda timeout_ms: SHARED["request"].queue.get_with_timeout(timeout_ms)
    ),
    "GenerationRequest.result": Subject(lambda timeout: SHARED["request"].result(timeout)),
    "generate": Subject(generate, GENERATED),
    "generate_sync": Subject(generate_sync, GENERATED),
    "surprisal": Subject(surprisal, TEXTS, names=OPTIONS_OF_TEXTS),
    "surprisal_sync": Subject(surprisal_sync, TEXTS, names=OPTIONS_OF_TEXTS),
    "prefix_logprob": Subject(prefix_logprob, {"lm": LM, "context": [1], "text": "a"}),
    "prefix_logprob_sync": Subject(prefix_logprob_sync, {"lm": LM, "context": [1], "text": "a"}),
    "continuations": Subject(continuations, {"lm": LM, "context": [1], "max_contexts": 2}),
    "continuations_sync": Subject(
        continuations_sync, {"lm": LM, "context": [1], "max_contexts": 2}
    ),
    "stream": Subject(stream, GENERATED),
    "AsyncGLM": Subject(AsyncGLM, {"model": MODEL}),
    "AsyncGLM over an AsyncLM": Subject(AsyncGLM, {"model": LM}),
    "AsyncGLM.submit": Subject(
        glm_method("submit"),
        {"inputs": [1], "generation_kwargs": {"max_new_tokens": 1}, "timeout": 0},
        (AsyncGLM.submit,),
    ),
    "generation_kwargs": Subject(
        lambda **given: SHARED["glm"].submit([1], {"max_new_tokens": 1, **given}, 0),
        names=HONOURED,
    ),
    "AsyncGLM.get_result": Subject(
        glm_method("get_result"),
        {"task_id": -1, "timeout": 0},
        (AsyncGLM.get_result,),
        accepting=(UnknownTaskError, TimeoutError),
    ),
    "AsyncGLM.is_ready": Subject(glm_method("is_ready"), declared=(AsyncGLM.is_ready,)),
    "AsyncGLM.shutdown": Subject(
        lambda **given: AsyncGLM(LM).shutdown(**given), declared=(AsyncGLM.shutdown,)
    ),
}
SUBJECTS["Engine.start_requests"] = Subject(
    engine_method("start_requests"),
    {"model_name": "m", "prompts": [[1]], "configs": [GenerationConfig(max_new_tokens=1)]},
    (Engine.start_requests,),
)
for _name in ("start_request_ids", "start_request_text", "generate", "stream"):
    _declared = getattr(Engine, _name)
    _prompt = [p for p in inspect.signature(_declared).parameters if p != "self"][1]
    SUBJECTS[f"Engine.{_name}"] = Subject(
        engine_method(_name),
        {
            "model_name": "m",
            _prompt: [[1]] if _prompt == "text" else [1],
            "max_new_tokens": 1,
            "eos_token_id": [*EOS],
        },
        (_declared,),
    )
for _name, _given in {
    "from_json_schema": {"schema": {}},
    "from_json_object": {},
    "from_regex": {"pattern": "a"},
    "from_choice": {"choices": ["a"]},
    "from_grammar": {"grammar": 'start: "a"'},
    "from_response_format": {"response_format": {"type": "json_object"}},
}.items():
    SUBJECTS[f"Constraint.{_name}"] = Subject(
        getattr(Constraint, _name), {"lm": LM, "eos_token_ids": [2], **_given}
    )
for _backend, _lm in BACKENDS.items():
    for _name, _given in {
        "next_token_logprobs": {"token_ids": [1]},
        "next_token_logprobs_sync": {"token_ids": [1]},
        "batch_next_token_logprobs": {"token_ids_list": [[1]]},
        "batch_next_token_logprobs_sync": {"token_ids_list": [[1]]},
        "score": {"prompt": [1], "continuation": [2]},
        "score_sync": {"prompt": [1], "continuation": [2]},
        "batch_score": {"prompts": [[1]], "continuations": [[2]]},
        "batch_score_sync": {"prompts": [[1]], "continuations": [[2]]},
        "sample": {"prompt_token_ids": [1], **SAMPLE},
        "batch_sample": {"prompt_token_ids_list": [[1]], **SAMPLE},
        "draw": {"row": torch.zeros(families.VOCAB)},
        "num_cached_tokens": {"token_ids": [1]},
        "check_adapter": {},
        "remove_lora": {},
        "add_new_lora": {"lora_path": "/no/such/adapter"},
    }.items():
        SUBJECTS[f"{_backend} {_name}"] = Subject(getattr(_lm, _name), _given)
SUBJECTS["cache_kv"] = Subject(HF.cache_kv, {"prompt_tokens": [1]})
for _name in ("batch_size", "timeout"):
    SUBJECTS[f"set {_name}"] = Subject(
        lambda value, _name=_name, **_: setattr(MockAsyncLM(word_tokenizer()), _name, value),
        names=(_name,),
    )
