"""A program that loads a GGUF file and computes one token, so that a process is not lost to it.

llama.cpp ends its process where an assertion fails, as it does at some files that are malformed.
This program knows nothing of this library, and is run by its path.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import ctypes
import sys
from typing import Any


def main(path: str, num_gpu_layers: int) -> None:
    """Load a file as the library does, read its vocabulary, and compute one token."""
    from llama_cpp import llama_cpp

    lib: Any = llama_cpp
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = num_gpu_layers
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:  # which the library finds out too, and tells
        return
    vocab = lib.llama_model_get_vocab(model)
    size, buffer = lib.llama_vocab_n_tokens(vocab), ctypes.create_string_buffer(256)
    for token_id in range(size):
        lib.llama_token_to_piece(vocab, token_id, buffer, 256, 0, True)
    if not size or not lib.llama_model_has_decoder(model) or lib.llama_model_has_encoder(model):
        return
    ids = (ctypes.c_int32 * 64)()
    text = "a é 1\n\u4f60\U0001f600\x00".encode()
    lib.llama_tokenize(vocab, text, len(text), ids, 64, True, True)
    own = lib.llama_context_default_params()
    own.n_ctx, own.n_batch, own.n_ubatch, own.n_seq_max = 256, 256, 256, 1
    context = lib.llama_init_from_model(model, own)
    if context and lib.llama_get_memory(context):
        lib.llama_decode(context, lib.llama_batch_get_one(ids, 1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
