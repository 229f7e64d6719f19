"""Every option of every public callable, given values of every kind.

Each is accepted, or refused by an error of the library whose message names the option; nothing else
comes out, and nothing is left behind. Options are found by their signatures, so that a new one is
covered without being listed.
"""

import asyncio
import inspect
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import genlm_backend
from genlm_backend import (
    AsyncGLM,
    AsyncTokenCharacterTrie,
    AsyncTransformer,
    AsyncVirtualLM,
    Constraint,
    Engine,
    GenerationConfig,
    MockAsyncLM,
    ParallelTokenCharacterTrie,
    Token,
    TokenCharacterTrie,
    decode_vocab,
    generate,
    lm_trie_weights,
    load_model_by_name,
    stream,
)
from genlm_backend.batching import Batcher, BatchPolicy
from genlm_backend.cache import RowCache
from genlm_backend.cache.output import OutputCache
from genlm_backend.errors import GenlmBackendError, ModelNotFoundError, UnknownTaskError
from genlm_backend.generation import RuntimeConfig
from genlm_backend.generation.hf_inputs import HONOURED
from genlm_backend.llm.batched import BatchedLM
from genlm_backend.llm.sampling import Sampler
from tests.llm import families
from tests.llm.conftest import word_tokenizer
from tests.llm.vllm.fake import FakeEngine

VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "2.5": 2.5,
    "3.0": 3.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 10**30,
    "huge float": 1e300,
    "beyond floats": 10**400,
    "empty text": "",
    "x": "x",
    "meta": "meta",
    "cuda:97": "cuda:97",
    "bytes": b"",
    "list": [],
    "list of text": ["a"],
    "list of None": [None],
    "list of dicts": [{}],
    "nested": [[1, 2]],
    "dict": {},
    "dict by numbers": {1: 2},
    "dict of an unknown name": {"no_such_name": 1},
    "object": object(),
    "class": int,
    "tensor": torch.tensor([1.0, 2.0]),
    "integer tensor": torch.tensor(3),
    "bool tensor": torch.tensor(True),
    "meta tensor": torch.zeros(2, dtype=torch.int64, device="meta"),
    "meta scalar": torch.zeros((), dtype=torch.int64, device="meta"),
    "float8 tensor": torch.zeros(4, dtype=torch.float8_e4m3fn),
    "sparse tensor": torch.zeros(4).to_sparse(),
    "numpy integer": np.int64(3),
    "numpy float": np.float32(0.5),
    "numpy bool": np.bool_(True),
    "array": np.array([1.5, 2.5]),
    "array of integers": np.array([1, 2]),
    "array of text": np.array(["a"]),
    "array of nothing": np.array([]),
}

WORDS = {
    "decode": "decode|entry|vocabulary",
    "vocab": "decode|entry|vocabulary",
    "eos_token_ids": "eos_token_ids|ends a text",
    "hf_tokenizer": "tokenizer|decode the vocabulary",
    "tokenizer": "tokenizer|decode the vocabulary",
    "input_ids": "input_ids|token|prompt",
    "inputs": "input|token",
    "lora_name": "lora_name|adapter",
    "lora_path": "lora_path|adapter",
    "model_id": "model|name",
    "model": "model|name",
    "prompt": "prompt|token|input_ids|chat",
    "prompt_token_ids": "token|context",
    "prompt_token_ids_list": "prompt_token_ids_list|token",
    "prompt_tokens": "token",
    "pattern": "pattern|regular expression|no such constraint",
    "grammar": "grammar|no such constraint|llguidance",
    "request": "request",
    "schema": "schema|constraint",
    "text": "text|token|prompt|chat",
    "token_ids": "token|context",
    "token_ids_list": "token",
    "ws": "weights",
    "num_return_sequences": r"num_return_sequences|\bn\b",
    "early_stopping": "early_stopping",
    "name": "name|model",
    "model_name": "model",
    "task_id": "task",
    "token_id": "token",
}
"""What a message may call an option instead of by its name."""

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
BACKENDS = {"mock": LM, "hf": HF, "vllm": VLLM}


@pytest.fixture(scope="module", autouse=True)
def shared():
    with Engine() as engine:
        engine.install_model("m", LM, warm_up=False)
        engine.start_model("m")
        request = engine.start_request_ids("m", [1], max_new_tokens=1)
        request.result()
        glm = AsyncGLM(LM, max_queue_size=100_000)
        SHARED.update(engine=engine, request=request, glm=glm)
        yield
        glm.shutdown(wait=False)
    SHARED.clear()
    for lm in BACKENDS.values():
        lm.close()


def engine_method(name):
    return lambda **given: getattr(SHARED["engine"], name)(**given)


def glm_method(name):
    return lambda **given: getattr(SHARED["glm"], name)(**given)


def with_option(function, option):
    """Call a function that takes some options as a mapping."""
    return lambda **given: function(**{option: given})


SUBJECTS: dict[str, Subject] = {
    "BatchPolicy": Subject(BatchPolicy),
    "Batcher": Subject(Batcher, {"evaluate": list}, (Batcher.__init__,)),
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
    "generate": Subject(generate, {"lm": LM, "prompt": [1], "max_new_tokens": 1}),
    "stream": Subject(stream, {"lm": LM, "prompt": [1], "max_new_tokens": 1}),
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
for _name in ("start_request_ids", "start_request_text", "generate", "stream"):
    _declared = getattr(Engine, _name)
    _prompt = [p for p in inspect.signature(_declared).parameters if p != "self"][1]
    SUBJECTS[f"Engine.{_name}"] = Subject(
        engine_method(_name),
        {"model_name": "m", _prompt: [[1]] if _prompt == "text" else [1], "max_new_tokens": 1},
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
        "sample": {"prompt_token_ids": [1], **SAMPLE},
        "batch_sample": {"prompt_token_ids_list": [[1]], **SAMPLE},
        "num_cached_tokens": {"token_ids": [1]},
        "forget": {"token_ids": [1]},
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

CASES = [(name, option) for name, subject in SUBJECTS.items() for option in subject.options()]


async def outcome(subject, arguments):
    """Call it, await what is to be awaited, and close what has been made."""
    found = subject.call(**arguments)
    if inspect.isasyncgen(found):
        found = [element async for element in found]
    if inspect.isawaitable(found):
        found = await asyncio.wait_for(found, 60)
    for made in found if isinstance(found, list) else [found]:
        if type(made).__name__ == "GenerationRequest":
            SHARED["engine"].stop_request(made)
        for end in ("close", "shutdown"):
            if hasattr(made, end):
                getattr(made, end)()


def is_at_the_call(error):
    """Whether Python itself refused the arguments, before the callable began."""
    words = r"unexpected keyword|required (positional|keyword)|multiple values"
    return re.search(words, str(error))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(eos|ids).*:UserWarning")
@pytest.mark.parametrize(("name", "option"), CASES, ids=lambda value: str(value))
async def test_a_value_is_accepted_or_refused_by_name(name, option):
    subject = SUBJECTS[name]
    words = f"{WORDS.get(option, re.escape(option))}|no_such_name"
    wrong = []
    for label, value in VALUES.items():
        before = set(threading.enumerate())
        arguments = {**subject.given, option: value}
        if name.startswith("set "):
            arguments = {"value": value}
        try:
            await outcome(subject, arguments)
        except subject.accepting:
            pass
        except GenlmBackendError as error:
            if not re.search(words, str(error), re.IGNORECASE):
                wrong.append(f"{label}: does not name it: {error!r}")
            left = {thread for thread in threading.enumerate() if thread.is_alive()} - before
            if left and "Engine()" not in inspect.getsource(subject.call):
                wrong.append(f"{label}: leaves {left}")
        except BaseException as error:
            if not (isinstance(error, TypeError) and is_at_the_call(error)):
                wrong.append(
                    f"{label}: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
                )
    assert not wrong, "\n".join(wrong)


NOT_HERE = {
    "AsyncLM": "abstract; its options are those of MockAsyncLM",
    "AsyncMlxLM": "takes anything and says that it is absent",
    "LMStatistics": "made by the library",
}


def test_every_public_name_has_its_options_here():
    """A new public class or function is given values of every kind too, or says why not."""
    calls = {re.split(r"[. ]", name)[0] for name in SUBJECTS}
    missing = [
        name
        for name in genlm_backend.__all__
        if callable(getattr(genlm_backend, name)) and name not in calls
    ]
    assert sorted(missing) == sorted(NOT_HERE)


async def test_one_mistaken_caller_is_alone(shared):
    """Others ask for rows meanwhile, and none of them notices."""
    expected = LM.next_token_logprobs_sync([1])
    wrong = [5, None, "x", [], [None], [families.VOCAB], VALUES["meta tensor"], [{}], b"x"]
    asked = [LM.next_token_logprobs(value) for value in wrong]
    asked += [LM.next_token_logprobs([1], lora_name=value) for value in (5, [], "none")]
    good = [LM.next_token_logprobs([1]) for _ in range(5)]
    found = await asyncio.gather(*asked, *good, return_exceptions=True)
    assert all(isinstance(error, GenlmBackendError) for error in found[: len(asked)])
    assert all(torch.equal(row, expected) for row in found[len(asked) :])
