"""``genlm.backend``: the names of genlm-backend, from this library."""

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import genlm_backend
from genlm_backend import errors
from genlm_backend.compat import replaced
from genlm_backend.compat.output_cache import OutputCache

# Every public name that each module of genlm-backend 0.3.1 defines or hands on as its own, and
# those of the release after it that its clients import.
NAMES = {
    "": """AsyncTokenCharacterTrie AsyncTransformer AsyncVirtualLM ParallelTokenCharacterTrie Token
        TokenCharacterTrie decode_vocab load_model_by_name batching cache draw llm tokenization
        trie""",
    ".batching": """BatchAbandoned batch_abandoned batch_stats fail_futures join_batch
        take_batch_stats""",
    ".cache": "OutputCache TokenTrie",
    ".draw": """DRAW_METHODS draw_from gumbel_max inverse_cdf logp_at logsumexp_from multinomial
        set_draw_method""",
    ".llm": """AsyncLM AsyncMlxLM AsyncSGLTransformer AsyncTransformer AsyncVirtualLM MockAsyncLM
        load_model_by_name temper base hf mlx sgl vllm""",
    ".llm.base": """AsyncLM BatchAbandoned MockAsyncLM UNKNOWN_ADAPTER batch_abandoned fail_futures
        temper""",
    ".llm.hf": "AsyncTransformer Query",
    ".llm.mlx": "AsyncMlxLM HAS_MLX",
    ".llm.sgl": "AsyncSGLTransformer HAS_SGL",
    ".llm.vllm": "AsyncVirtualLM BackendScheduler HAS_VLLM",
    ".tokenization": "Token decode_vocab bytes token vocab",
    ".tokenization.bytes": """ByteDecoderError ByteVocabError check_byte_decoder get_byte_vocab
        get_byte_tokens_from_byte_decoder get_byte_tokens_from_sp""",
    ".tokenization.token": "Token",
    ".tokenization.vocab": "bytes_to_strs decode_vocab",
    ".trie": """AsyncTokenCharacterTrie ParallelTokenCharacterTrie TokenCharacterTrie async_impl
        base parallel""",
    ".trie.async_impl": "AsyncTokenCharacterTrie",
    ".trie.base": "TokenCharacterTrie",
    ".trie.parallel": "ParallelTokenCharacterTrie",
}


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=os.environ
    )


@pytest.mark.parametrize("module", NAMES)
def test_every_older_name_exists_and_comes_from_this_library(module):
    alias = importlib.import_module(f"genlm.backend{module}")
    for name in NAMES[module].split():
        assert name in dir(alias)
        value = getattr(alias, name)
        home = getattr(value, "__module__", None) or getattr(value, "__name__", "")
        is_plain = isinstance(value, (bool, str, dict))
        assert is_plain or home.startswith(("genlm_backend", "genlm.backend"))
        if isinstance(value, type):
            assert home.startswith("genlm_backend")
    assert set(alias.__all__) <= set(dir(alias))
    with pytest.raises(AttributeError, match="no_such_name"):
        alias.no_such_name  # noqa: B018


def test_older_names_are_the_same_objects():
    import genlm.backend
    import genlm.backend.llm

    assert genlm.backend.llm.AsyncTransformer is genlm_backend.AsyncTransformer
    assert genlm.backend.llm.hf.AsyncTransformer is genlm_backend.AsyncTransformer
    for name in genlm.backend.__all__:
        assert getattr(genlm.backend, name) is getattr(genlm_backend, name)
    for name in ("AsyncLM", "MockAsyncLM", "AsyncMlxLM", "AsyncSGLTransformer"):
        assert getattr(genlm.backend.llm, name) is getattr(genlm_backend.llm, name)
    assert genlm.backend.llm.base.BatchAbandoned is errors.QueryDroppedError
    assert genlm.backend.tokenization.bytes.ByteVocabError is errors.TokenizerDecodeError


def test_submodules_need_no_import_of_their_own_and_load_no_torch():
    code = """
import sys
import genlm.backend
assert not {"torch", "numpy", "transformers"} & set(sys.modules)
print(genlm.backend.llm.base.AsyncLM.__name__, genlm.backend.trie.TokenCharacterTrie.__name__)
"""
    assert run(code).stdout == "AsyncLM TokenCharacterTrie\n"


def test_dropped_or_reloaded_modules_give_the_same_classes():
    import genlm.backend.llm.hf
    from genlm.backend.llm import AsyncTransformer

    held = genlm.backend.llm
    dropped = [name for name in sys.modules if name.startswith("genlm.backend")]
    saved = {name: sys.modules.pop(name) for name in dropped}
    try:
        assert importlib.import_module("genlm.backend.llm") is not held
        assert importlib.import_module("genlm.backend.llm.hf").AsyncTransformer is AsyncTransformer
        assert held.MockAsyncLM is genlm_backend.MockAsyncLM  # from a module that was dropped
        again = importlib.reload(importlib.import_module("genlm.backend.llm"))
        assert again.AsyncTransformer is AsyncTransformer
    finally:
        sys.modules.update(saved)


def test_genlm_is_a_namespace_package_shared_with_others(tmp_path):
    assert not (Path(genlm_backend.__file__).parent.parent / "genlm" / "__init__.py").exists()
    (tmp_path / "genlm" / "control").mkdir(parents=True)
    (tmp_path / "genlm" / "control" / "__init__.py").write_text("from genlm.backend import Token\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import genlm.control, genlm_backend
assert genlm.control.Token is genlm_backend.Token
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_pickle_of_the_older_module_name_loads_as_a_token():
    written = b"cgenlm.backend.tokenization.token\nToken\n(I7\nC\x02abtR."
    token = pickle.loads(written)
    assert type(token) is genlm_backend.Token
    assert (token.token_id, bytes(token)) == (7, b"ab")


def test_sgl_backend_raises_import_error_on_use():
    from genlm.backend.llm import AsyncSGLTransformer

    for use in (AsyncSGLTransformer, AsyncSGLTransformer.from_name):
        with pytest.raises(ImportError, match=r"AsyncSGLTransformer is not available.*'hf'"):
            use("gpt2")
    with pytest.raises(ImportError, match=r"AsyncSGLTransformer is not available.*'hf'"):
        genlm_backend.load_model_by_name("gpt2", backend="sgl")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Query", ([1], None)),
        ("TokenTrie", ()),
        ("BackendScheduler", ()),
        ("get_byte_tokens_from_byte_decoder", (None, {})),
        ("get_byte_tokens_from_sp", (None,)),
        ("check_byte_decoder", (None, {})),
        ("bytes_to_strs", (None, [], "replace")),
    ],
)
def test_replaced_name_raises_not_implemented_error(name, arguments):
    with pytest.raises(NotImplementedError, match=f"^{name} of genlm-backend 0.3.1"):
        getattr(replaced, name)(*arguments)


def test_get_byte_vocab_gives_plain_bytes():
    from tests.llm.conftest import word_tokenizer

    found = replaced.get_byte_vocab(word_tokenizer(3))
    assert found == [b"<0>", b"<1>", b"<2>"]
    assert {type(entry) for entry in found} == {bytes}


def test_output_cache_evicts_the_least_recently_used_entry():
    cache = OutputCache(maxsize=2)
    cache["a"], cache["b"] = torch.ones(1), torch.ones(2)
    assert len(cache["a"]) == 1
    cache["c"] = torch.ones(3)
    assert ("a" in cache, "b" in cache, "c" in cache, len(cache)) == (True, False, True, 2)
    with pytest.raises(KeyError):
        cache["b"]
    cache.clear()
    assert len(cache) == 0
    with pytest.raises(ValueError, match="maxsize must be an integer of 0 or more"):
        OutputCache(-1)
