"""Decoders that are not declared, or that cannot be read."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from genlm_backend import decode_vocab
from genlm_backend.errors import TokenizerDecodeError
from tests.tokenization.samples import LANGUAGES
from tests.tokenization.small_tokenizers import SMALL, byte_level, llama_like, trained


@pytest.mark.parametrize("name", ["byte-level", "unigram", "word-piece", "suffix-bpe"])
def test_a_decoder_that_is_not_declared_is_inferred(name):
    tokenizer = SMALL[name]()
    declared = decode_vocab(tokenizer)
    state = tokenizer.to_str()
    data = json.loads(state)
    data["decoder"] = None
    bare = Tokenizer.from_str(json.dumps(data))
    assert bare.decoder is None
    assert [t.byte_string for t in decode_vocab(bare).byte_vocab] == [
        t.byte_string for t in declared.byte_vocab
    ]


def test_a_llama_like_decoder_is_inferred_from_its_normalizer():
    tokenizer = llama_like()
    declared = decode_vocab(tokenizer).byte_vocab
    data = json.loads(tokenizer.to_str())
    data["decoder"] = None
    bare = decode_vocab(Tokenizer.from_str(json.dumps(data))).byte_vocab
    assert [t.byte_string for t in bare] == [t.byte_string for t in declared]


def test_words_split_at_white_space_begin_with_a_space():
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert [bytes(t) for t in decode_vocab(tokenizer).byte_vocab] == [b" hello", b" world", b" ?"]


def test_continuing_subwords_of_bpe_join_their_word():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", continuing_subword_prefix="##"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>"],
        continuing_subword_prefix="##",
        show_progress=False,
    )
    trained(tokenizer, trainer)
    assert tokenizer.decoder is None
    vocabulary = decode_vocab(tokenizer)
    for text in LANGUAGES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined == " " + text


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0, "b": 1}, unk_token="<unk>"),
        models.BPE({"a": 0, "b": 1}, [], unk_token="<unk>"),
        models.BPE({"a": 0, "b": 1}, []),
        models.Unigram([("a", 0.0), ("b", 0.0)]),
        models.Unigram([("a", 0.0), ("b", 0.0), ("?", 0.0)], unk_id=2),
    ],
    ids=["word-level", "bpe", "bpe-that-drops", "unigram", "unigram-unknown"],
)
def test_tokenizer_that_cannot_spell_the_probes_is_still_decoded(model):
    vocabulary = decode_vocab(Tokenizer(model))
    assert [bytes(token) for token in vocabulary.byte_vocab[:2]] == [b"a", b"b"]


def test_unsupported_tokenizer_raises_decode_error_with_a_reason():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(TokenizerDecodeError, match=r"Tokenizer.*CTC") as caught:
        decode_vocab(tokenizer)
    assert isinstance(caught.value, ValueError)
    assert caught.value.tokenizer == "Tokenizer"
    assert "CTC" in caught.value.reason

    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(TokenizerDecodeError, match="white space"):
        decode_vocab(tokenizer)

    with pytest.raises(TokenizerDecodeError, match="object"):
        decode_vocab(object())


class PythonDecoder:
    def decode(self, tokens):
        return "".join(tokens)

    def decode_chain(self, tokens):
        return tokens


class PythonNormalizer:
    def normalize(self, normalized):
        normalized.lowercase()


class PythonPreTokenizer:
    def pre_tokenize(self, pre_tokenized):
        pre_tokenized.split(lambda _, text: text.split(" ", "merged_with_next"))


def test_decoder_written_in_python_raises_decode_error():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Decoder.custom(PythonDecoder())
    with pytest.raises(TokenizerDecodeError, match="serialised") as caught:
        decode_vocab(tokenizer)
    assert caught.value.tokenizer == "Tokenizer"


@pytest.mark.parametrize("name", SMALL)
def test_normalizer_and_pre_tokenizer_in_python_do_not_change_the_bytes(name):
    tokenizer = SMALL[name]()
    declared = decode_vocab(tokenizer).byte_vocab
    own = tokenizer.normalizer, tokenizer.pre_tokenizer
    custom = normalizers.Normalizer.custom(PythonNormalizer())
    tokenizer.normalizer = normalizers.Sequence([custom, own[0]]) if own[0] else custom
    custom = pre_tokenizers.PreTokenizer.custom(PythonPreTokenizer())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([custom, own[1]]) if own[1] else custom
    vocabulary = decode_vocab(tokenizer).byte_vocab
    assert [bytes(token) for token in vocabulary] == [bytes(token) for token in declared]


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_python_parts_without_a_declared_decoder_raise_decode_error(part):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    if part == "normalizer":
        tokenizer.normalizer = normalizers.Normalizer.custom(PythonNormalizer())
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(PythonPreTokenizer())
    with pytest.raises(TokenizerDecodeError, match="serialised"):
        decode_vocab(tokenizer)


def test_unigram_model_with_another_unknown_token_is_decoded():
    from transformers import PreTrainedTokenizerFast

    rust = SMALL["unigram"]()
    state = json.loads(rust.to_str())
    state["model"]["vocab"].insert(1, ["<other>", 0.0])
    state["model"]["unk_id"] = 1
    state["added_tokens"] = []
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    tokenizer.unk_token = "<unk>"
    assert 1 in tokenizer.encode("\U0002a6d6")
    expected = [bytes(token) for token in decode_vocab(rust).byte_vocab]
    decoded = [bytes(token) for token in decode_vocab(tokenizer).byte_vocab]
    assert decoded == [expected[0], b"<other>", *expected[1:]]
