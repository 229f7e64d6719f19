"""Gemma 3's tokenizer, from the header of a GGUF file whose beginning a package carries."""

import struct
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.tokenization_utils_base import generate_merges

# The format's own numbers: of types, and of what a token may be.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
NORMAL, USER_DEFINED, BYTE = 1, 4, 6
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]


def read_header(path: Path) -> dict:
    """The metadata of a GGUF file; ``gguf.GGUFReader`` refuses a file without all its tensors."""
    with path.open("rb") as file:

        def numbers(letter, count=1):
            return struct.unpack(f"<{count}{letter}", file.read(count * struct.calcsize(letter)))

        def string():
            return file.read(numbers("Q")[0]).decode()

        def value(kind):
            if kind == STRING:
                return string()
            if kind != ARRAY:
                return numbers(NUMBERS[kind])[0]
            (kind,), (count,) = numbers("I"), numbers("Q")
            if kind in (STRING, ARRAY):
                return [value(kind) for _ in range(count)]
            return list(numbers(NUMBERS[kind], count))

        assert file.read(4) == b"GGUF"
        numbers("I")
        _, count = numbers("Q", 2)
        return {string(): value(numbers("I")[0]) for _ in range(count)}


def gemma3(path: Path) -> Tokenizer:
    """The tokenizer as Gemma's own ``tokenizer.json`` has it."""
    header = read_header(path)
    kinds = header["tokenizer.ggml.token_type"]
    # The file has spaces in place of the "▁" in user-defined pieces.
    pieces = [
        piece.replace(" ", "▁") if kind == USER_DEFINED else piece
        for piece, kind in zip(header["tokenizer.ggml.tokens"], kinds, strict=True)
    ]
    scores = dict(zip(pieces, header["tokenizer.ggml.scores"], strict=True))
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    merges = generate_merges(vocab, scores)
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [
            AddedToken(piece, normalized=False, special=piece in SPECIAL)
            for piece, kind in zip(pieces, kinds, strict=True)
            if kind not in (NORMAL, BYTE)
        ]
    )
    return tokenizer
