"""The tokenizer classes of transformers, built from small vocabularies that are trained here."""

import functools
import json

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from genlm_backend import decode_vocab
from genlm_backend.errors import TokenizerDecodeError
from genlm_backend.tokenization.reader import read_byte_vocab
from genlm_backend.tokenization.self_check import check_byte_vocab
from tests.tokenization.small_tokenizers import TEXTS, byte_level, byte_pieces, trained

COLLAPSING = [  # of white space, by their pre-tokenizer or by their normalizer
    "AlbertTokenizer",
    "BigBirdTokenizer",
    "CamembertTokenizer",
    "MBart50Tokenizer",
    "MBartTokenizer",
    "RemBertTokenizer",
    "T5Tokenizer",
    "XLMRobertaTokenizer",
    "XLNetTokenizer",
]
OTHERS = [
    "BarthezTokenizer",
    "BartTokenizer",
    "BertTokenizer",
    "BlenderbotTokenizer",
    "CLIPTokenizer",
    "CodeLlamaTokenizer",
    "CohereTokenizer",
    "DPRQuestionEncoderTokenizer",
    "DebertaTokenizer",
    "DebertaV2Tokenizer",
    "FNetTokenizer",
    "FunnelTokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "GemmaTokenizer",
    "HerbertTokenizer",
    "LayoutLMv2Tokenizer",
    "LayoutXLMTokenizer",
    "LlamaTokenizer",
    "LukeTokenizer",
    "LxmertTokenizer",
    "MLukeTokenizer",
    "MPNetTokenizer",
    "NllbTokenizer",
    "NougatTokenizer",
    "OpenAIGPTTokenizer",
    "Qwen2Tokenizer",
    "ReformerTokenizer",
    "RobertaTokenizer",
    "SeamlessM4TTokenizer",
    "SplinterTokenizer",
    "UdopTokenizer",
    "WhisperTokenizer",
    "XGLMTokenizer",
]


@functools.cache
def model_state(kind, is_byte_level, suffix):
    """The state of a small model of this kind."""
    tokenizer = Tokenizer(getattr(models, kind)())
    if is_byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "WordPiece":
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif suffix:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    settings = {"vocab_size": 900, "show_progress": False}
    if suffix:
        settings["end_of_word_suffix"] = suffix
    if is_byte_level:
        settings["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    if kind == "Unigram":
        settings |= {"special_tokens": ["<unk>"], "unk_token": "<unk>"}
    trainer = getattr(trainers, {"BPE": "BpeTrainer"}.get(kind, f"{kind}Trainer"))
    return json.loads(trained(tokenizer, trainer(**settings)).to_str())["model"]


def build(name):
    """An instance whose vocabulary begins as the class's own does."""
    kind = getattr(transformers, name)
    bare = kind().backend_tokenizer
    state = model_state(
        type(bare.model).__name__,
        "ByteLevel" in str(bare.pre_tokenizer),
        getattr(bare.model, "end_of_word_suffix", None),
    )
    own = bare.get_vocab(with_added_tokens=False)
    first = sorted(own, key=own.__getitem__)
    if type(bare.model).__name__ == "Unigram":
        others = [(piece, score) for piece, score in state["vocab"] if piece not in own]
        return kind(vocab=[*((piece, 0.0) for piece in first), *others])
    if getattr(bare.model, "byte_fallback", False):
        first += byte_pieces()
    vocab = {}
    for piece in [*first, "[UNK]", *sorted(state["vocab"], key=state["vocab"].__getitem__)]:
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(pair) for pair in state.get("merges", [])]
    return kind(vocab=vocab, **({"merges": merges} if merges else {}))


def encoded(tokenizer, vocabulary, text):
    """The ids of a text that are not special."""
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return [token_id for token_id in ids if token_id not in vocabulary.special_ids]


@pytest.mark.parametrize("name", COLLAPSING + OTHERS)
def test_joined_bytes_are_the_decoded_text(name):
    tokenizer = build(name)
    vocabulary = decode_vocab(tokenizer)
    for text in (text for text in TEXTS if "</w>" not in text and "[" not in text):
        ids = encoded(tokenizer, vocabulary, text)
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode("utf-8", "replace")
        printed = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        if name == "CLIPTokenizer":
            printed = printed.replace("</w>", " ")
        assert joined.strip(" ") == printed.strip(" ")


@pytest.mark.parametrize("name", COLLAPSING)
def test_tokenizers_that_collapse_white_space_are_decoded(name):
    tokenizer = build(name)
    vocabulary = decode_vocab(tokenizer)
    for text in ("the  quick brown", "jumps over\nthe\tlazy", "  dog "):
        ids = encoded(tokenizer, vocabulary, text)
        joined = b"".join(vocabulary.byte_vocab[i] for i in ids).decode()
        assert "".join(joined.split()) == "".join(text.split())
        assert "  " not in joined.strip(" ")


@pytest.mark.parametrize("name", COLLAPSING)
def test_wrong_bytes_are_found_even_if_white_space_collapses(name):
    vocab = read_byte_vocab(build(name))
    check_byte_vocab(vocab)
    token_id = vocab.encode("the quick (brown) fox's tail_is <b>bold</b>")[0]
    vocab.byte_strings[token_id] = b"?"
    with pytest.raises(TokenizerDecodeError, match=r"does not round-trip|prints") as caught:
        check_byte_vocab(vocab)
    assert caught.value.token_id == token_id


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("stride", [0, 1, 2])
def test_truncation_and_padding_of_earlier_calls_have_no_effect(direction, stride):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<eos>", pad_token="<eos>"
    )
    expected = decode_vocab(tokenizer)
    tokenizer.truncation_side = tokenizer.padding_side = direction
    tokenizer(["a", "a b c d e f"], truncation=True, max_length=4, stride=stride, padding=True)
    assert tokenizer.backend_tokenizer.truncation is not None
    tokenizer.backend_tokenizer.enable_padding(length=9, direction=direction)
    vocab = read_byte_vocab(tokenizer)
    for text in TEXTS:
        assert b"".join(vocab.byte_strings[i] for i in vocab.encode(text)) == text.encode()
    assert decode_vocab(tokenizer) == expected
    vocab.byte_strings[tokenizer.convert_tokens_to_ids("r")] = b"?"  # beyond the first four
    with pytest.raises(TokenizerDecodeError, match="does not round-trip"):
        check_byte_vocab(vocab)
