"""Real engines of vLLM over a tiny model and the bundled one, loaded once and shared by tests."""

import copy
import tempfile
from functools import cache
from importlib.util import find_spec

import torch
import transformers as tf

from tests.llm import families
from tests.naive import naive_row

IS_INSTALLED = find_spec("vllm") is not None


@cache
def tiny_model():
    """A random Llama with heads as wide as vLLM's kernels want them."""
    torch.manual_seed(0)
    config = families._config(
        "LlamaConfig", hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32
    )
    config.initializer_range = 0.2  # sharp enough that a wrong context shows
    return tf.LlamaForCausalLM(config).eval()


@cache
def tiny_model_exact():
    """The same in float64, of which neither's rounding is compared with the other's."""
    return copy.deepcopy(tiny_model()).double()


@cache
def tiny_folder():
    """Where ``tiny_model`` is saved."""
    folder = tempfile.mkdtemp()
    tiny_model().save_pretrained(folder)
    return folder


TINY_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_num_seqs": 24,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 8 << 20,
}


def load_tiny(**options):
    """Load ``tiny_model`` into an engine of its own."""
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine
    from tests.llm.conftest import word_tokenizer

    return VLLMEngine.load(tiny_folder(), {**TINY_OPTIONS, **options}, word_tokenizer())


@cache
def small_smollm2():
    """The bundled model with the first tokens of its vocabulary only."""
    from genlm_backend.backends.bundled import bundled_directory

    model = tf.AutoModelForCausalLM.from_pretrained(
        bundled_directory("smollm2"), dtype=torch.float32
    )
    model.resize_token_embeddings(families.VOCAB, mean_resizing=False)
    return model.eval()


@cache
def small_smollm2_exact():
    """``small_smollm2`` in float64: float32 is 8e-4 off after 30 layers, whoever computes it."""
    return copy.deepcopy(small_smollm2()).double()


@cache
def exact_row(token_ids):
    """The row after a context, from float64."""
    return naive_row(small_smollm2_exact(), token_ids)


@cache
def small_smollm2_engine():
    """The engine of ``small_smollm2``."""
    from genlm_backend.backends.vllm.vllm_engine import VLLMEngine
    from tests.llm.conftest import word_tokenizer

    folder = tempfile.mkdtemp()
    small_smollm2().save_pretrained(folder)
    options = {**TINY_OPTIONS, "kv_cache_memory_bytes": 128 << 20}
    return VLLMEngine.load(folder, options, word_tokenizer())


_tiny = None


def tiny_engine():
    """The engine of ``tiny_model`` that tests share."""
    global _tiny
    if _tiny is None:
        _tiny = load_tiny()
    return _tiny


def close_tiny_engine():
    """Make place for another engine in this process."""
    global _tiny
    if _tiny is not None:
        _tiny.close()
    _tiny = None


class SharedEngine:
    """An engine whose closing ends its sessions only."""

    def __init__(self, engine):
        self._engine = engine
        self._ids = set()
        self._steps = engine.num_steps

    def __getattr__(self, name):
        return getattr(self._engine, name)

    @property
    def num_steps(self):
        return self._engine.num_steps - self._steps

    def add(self, placement):
        self._ids.add(placement.session)
        self._engine.add(placement)

    def close(self):
        self._engine.stop(list(self.completions.values()))
        self._engine.end(list(self._ids))
        if not self._engine._sessions:  # of another model that shares it
            self._engine.reset()
