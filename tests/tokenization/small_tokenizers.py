"""Small tokenizers of every kind, trained here on a few sentences."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.tokenization.samples import LANGUAGES, ODD

TEXTS = [*LANGUAGES, *ODD]


def trained(tokenizer, trainer):
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_level(**pre):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **pre)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    return trained(tokenizer, trainer)


def unigram(byte_fallback=False):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=1500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    return trained(tokenizer, trainer)


def byte_pieces():
    return [f"<0x{byte:02X}>" for byte in range(256)]


def llama_like():
    vocab = {"<unk>": 0, "<s>": 1, **{b: 2 + i for i, b in enumerate(byte_pieces())}}
    for piece in ["▁", "a", "b", "c", "é", "▁a", "ab", "▁ab", "▁▁"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def gemma_like():
    tokenizer = llama_like()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    return trained(tokenizer, trainer)


def suffix_bpe():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    return trained(tokenizer, trainer)


def clip_like():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\w+|[^\s\w]+"), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<unk>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    return trained(tokenizer, trainer)


SMALL = {
    "byte-level": byte_level,
    "byte-level-no-regex": lambda: byte_level(use_regex=False),
    "unigram": unigram,
    "llama-like": llama_like,
    "word-piece": word_piece,
    "suffix-bpe": suffix_bpe,
}
