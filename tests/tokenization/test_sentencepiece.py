"""SentencePiece models trained here on a few sentences, in each of the objects that hold one."""

import functools
import io
from types import SimpleNamespace

import pytest
import sentencepiece
from transformers import (
    AddedToken,
    BertGenerationTokenizer,
    GemmaTokenizer,
    GPTSw3Tokenizer,
    LlamaTokenizer,
)
from transformers.convert_slow_tokenizer import SpmConverter

from genlm_backend import decode_vocab
from tests.tokenization.checks import check_strings
from tests.tokenization.samples import LANGUAGES, ODD

TEXTS = [*LANGUAGES, *ODD, "x = [1, 2];\n\tprint(x)  # two spaces", "  a   b ", "ﬁne ① Å"]
RUNS = ["▁" * length for length in range(2, 9)]


@functools.cache
def trained(**settings):
    """A serialised model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LANGUAGES),
        model_writer=model,
        vocab_size=1200,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return model.getvalue()


def processor(**settings):
    return sentencepiece.SentencePieceProcessor(model_proto=trained(**settings))


@pytest.fixture
def slow(tmp_path):
    """Makes a slow tokenizer, of the kind that transformers still has."""

    def make(**settings):
        path = tmp_path / "spiece.model"
        path.write_bytes(trained(**settings))
        return GPTSw3Tokenizer(str(path), name_or_path="test")

    return make


def same_up_to_the_outer_spaces(joined, expected):
    return joined.decode().strip(" ") == expected.strip(" ")


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("as_suffix", [True, False])
@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc_cf", "identity"])
@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
def test_joined_bytes_are_the_normalized_text(slow, model_type, rule, as_suffix, byte_fallback):
    settings = {
        "model_type": model_type,
        "normalization_rule_name": rule,
        "treat_whitespace_as_suffix": as_suffix,
        "byte_fallback": byte_fallback,
    }
    model, tokenizer = processor(**settings), slow(**settings)
    for vocabulary, encode, prepare in (
        (decode_vocab(model), model.encode, str),
        (
            decode_vocab(tokenizer),
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            tokenizer.preprocess_text,
        ),
    ):
        check_strings(vocabulary)
        for text in TEXTS:
            ids = encode(text)
            if vocabulary.special_ids.intersection(ids):
                assert not byte_fallback
                continue
            joined = b"".join(vocabulary.byte_vocab[i] for i in ids)
            normalized = model.normalize(prepare(text)).replace("▁", " ")
            assert same_up_to_the_outer_spaces(joined, normalized)
            assert same_up_to_the_outer_spaces(joined, model.decode(ids))


@pytest.mark.parametrize("content", ["  ", "<tool>", "▁▁", " x ", "\n"])
def test_added_token_of_a_slow_tokenizer_splits_the_text(slow, content):
    tokenizer = slow(byte_fallback=True)
    tokenizer.add_tokens([content])
    vocabulary = decode_vocab(tokenizer)
    added = tokenizer.convert_tokens_to_ids(content)
    assert vocabulary.byte_vocab[added].byte_string == content.encode()
    ids = tokenizer.encode(f"eins{content}zwei", add_special_tokens=False)
    before, after = ids[: ids.index(added)], ids[ids.index(added) + 1 :]
    for part, text in ((before, "eins"), (after, "zwei")):
        joined = b"".join(vocabulary.byte_vocab[i] for i in part)
        assert same_up_to_the_outer_spaces(joined, text)


USER_DEFINED = ",".join([*RUNS, "\n", "\n\n", "<table>"])
SPACES = "".join("der" + " " * length for length in range(12))


def check_runs(tokenizer, rust):
    added = {token.content for token in rust.get_added_tokens_decoder().values()}
    assert added >= set(USER_DEFINED.split(","))
    vocabulary = decode_vocab(tokenizer)
    check_strings(vocabulary)
    for run in RUNS:
        token = vocabulary.byte_vocab[rust.token_to_id(run)]
        assert token.byte_string == b" " * len(run)
        assert token.token_id not in vocabulary.special_ids
    return vocabulary


@pytest.mark.parametrize("family", [GemmaTokenizer, LlamaTokenizer])
def test_runs_of_spaces_are_decoded_after_transformers_conversion(tmp_path, family):
    model = trained(
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        user_defined_symbols=USER_DEFINED,
    )
    (tmp_path / "tokenizer.model").write_bytes(model)
    tokenizer = family.from_pretrained(tmp_path, local_files_only=True)
    vocabulary = check_runs(tokenizer, tokenizer.backend_tokenizer)
    reached = set()
    for text in ["def f():\n    return 1", f"{SPACES}\n\n<table>\nx", *LANGUAGES]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        reached.update(tokenizer.convert_ids_to_tokens(ids))
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined.removeprefix(" ") == text
        assert joined.removeprefix(" ") == tokenizer.decode(ids)
    assert reached >= {"▁▁", "▁▁▁", "\n\n", "<table>"}


def test_runs_of_spaces_are_decoded_after_an_older_conversion(tmp_path):
    settings = {"normalization_rule_name": "nmt_nfkc", "user_defined_symbols": USER_DEFINED}
    path = tmp_path / "spiece.model"
    path.write_bytes(trained(model_type="unigram", **settings))
    tokenizer = SpmConverter(SimpleNamespace(vocab_file=str(path))).converted()
    vocabulary = check_runs(tokenizer, tokenizer)
    for text in ["def f():\n    return 1", SPACES, *LANGUAGES]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if vocabulary.special_ids.intersection(ids):
            continue
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined.removeprefix(" ") == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [GPTSw3Tokenizer, BertGenerationTokenizer])
def test_added_token_already_in_a_slow_model_joins_to_the_text(tmp_path, kind):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the  quick   fox a  b    c", "hello  world"] * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=80,
        hard_vocab_limit=False,
        minloglevel=2,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
    )
    path = tmp_path / "spiece.model"
    path.write_bytes(model.getvalue())
    tokenizer = kind(vocab_file=str(path))
    size = len(tokenizer)
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])
    assert len(tokenizer) == size  # the model has it
    vocabulary = decode_vocab(tokenizer)
    for text in ("the  quick", "a  b    c"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert joined.strip() == tokenizer.decode(ids).strip() == text


@pytest.mark.parametrize("kind", [GPTSw3Tokenizer, BertGenerationTokenizer])
@pytest.mark.parametrize("content", ["x▁y", "▁▁", " w ", "neu"])
def test_bytes_of_added_token_are_those_a_slow_tokenizer_prints(tmp_path, kind, content):
    path = tmp_path / "spiece.model"
    path.write_bytes(trained(byte_fallback=True))
    tokenizer = kind(vocab_file=str(path))
    tokenizer.add_tokens([AddedToken(content, normalized=False)])
    token = decode_vocab(tokenizer).byte_vocab[tokenizer.convert_tokens_to_ids(content)]
    letter = tokenizer.convert_tokens_to_ids("a")
    assert tokenizer.decode([letter, token.token_id, letter]) == f"a{token.decode()}a"
