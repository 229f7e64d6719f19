"""The test suites of the programs that run on this library, and what of them cannot pass on it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """A test suite out of a source distribution.

    Attributes:
        distribution: Its name on PyPI.
        version: The release that is tested.
        num_tests: How many tests it has, so that none is lost unnoticed.
        folders: What is taken out of the distribution; the first one holds the tests.
        left_out: Files that take long and use nothing of this library but its tokens; only
            ``make test-all`` runs them.
        failures: Test, or test without its parameters → why it does not pass here. One that
            passes all the same is an error of this list.
        uncertain: The same of tests that draw at random, and so pass at times.
    """

    distribution: str
    version: str
    num_tests: int
    folders: tuple[str, ...] = ("tests",)
    left_out: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    uncertain: dict[str, str] = field(default_factory=dict)


_QUEUE = "reaches into the queue of 0.3.1, which the batcher replaces"
_CACHE = "reads the cache of 0.3.1, which the prefix cache replaces"
_TRIE = "calls a private method of the tries of 0.3.1"
_SILENT = "expects a deprecation warning for plain bytes, which are welcome here"
_MACHINERY = "takes the decoding of 0.3.1 apart, which decode_vocab replaces"
_BYTES = "SmolLM2 has no token for some bytes and leaves them out of random texts"
_QUALITY = "asks for a text that ends as GPT-2's do, and not as those of four layers"
_VALKYRIA = "counts on how GPT-2 divides a made-up word into tokens"

SUITES = (
    Suite("llamppl", "0.2.3", 48, folders=("tests", "examples", "html")),
    Suite(
        "genlm-bytes",
        "0.2.0",
        119,
        failures={
            "tests/test_beam.py::test_generate": _QUALITY,
            "tests/test_beam.py::test_eos_termination": (
                "begins a text with the id that ends one, as GPT-2 does"
            ),
            "tests/test_healing.py::test_heal_max_backoff_limited_fails": _VALKYRIA,
            "tests/test_healing.py::test_heal_max_splits_zero": _VALKYRIA,
        },
    ),
    Suite(
        "genlm-backend",
        "0.3.1",
        127,
        failures={
            "tests/test_hf_llm.py::test_caching": _CACHE,
            "tests/test_hf_llm.py::test_cache_operations": _CACHE,
            "tests/test_hf_llm.py::test_cache_kv": _CACHE,
            "tests/test_hf_llm.py::test_walk_cache_with_past": _CACHE,
            "tests/test_hf_llm.py::test_reset_async_queries": _QUEUE,
            "tests/test_hf_llm.py::test_batch_timeout": _QUEUE,
            "tests/test_trie.py::test_async_trie_cleanup": _TRIE,
            "tests/test_trie.py::test_async_error_handling": _TRIE,
            "tests/test_trie.py::test_sequential_preprocessing": _TRIE,
            "tests/test_trie.py::test_parallel_preprocessing[cpu]": _TRIE,
            "tests/test_trie.py::test_trie_with_non_token_iterables": _SILENT,
            "tests/test_trie.py::test_trie_duplicate_word_error": _SILENT,
            "tests/test_vocabulary.py::test_byte_decoder_error_handling": _MACHINERY,
            "tests/test_vocabulary.py::test_decode_vocab_failure": _MACHINERY,
            "tests/test_vocabulary.py::test_unknown_byte_encoding_is_rejected": _MACHINERY,
        },
        uncertain={
            "tests/test_vocabulary.py::test_gpt2": _BYTES,
        },
    ),
    Suite(
        "genlm-control",
        "0.4.1",
        478,
        left_out=(
            "tests/sampler/test_awrs.py",
            "tests/potential/test_json.py",
            "tests/potential/test_stateful.py",
            "tests/potential/test_wfsa.py",
        ),
        failures={
            "tests/potential/test_llm.py::test_spawn": "counts on the id that GPT-2 has for '!'",
            "tests/potential/test_canonical.py::test_from_llm_extract_merges_fallback": (
                "asks for a tokenizer that only the hub has"
            ),
        },
        uncertain={
            "tests/potential/test_canonical.py::test_example": _BYTES,
            "tests/potential/test_llm.py::test_prompt_setting": _BYTES,
            "tests/potential/test_llm.py::test_scoring": _BYTES,
            "tests/potential/test_llm.py::test_properties": _BYTES,
            "tests/potential/test_llm.py::test_batch_consistency": _BYTES,
            "tests/potential/test_llm.py::test_new_eos_tokens": (
                "draws ids of GPT-2's vocabulary, of which SmolLM2 has the first 49,152"
            ),
            "tests/potential/test_bytellm.py::test_bytelm_smc": _QUALITY,
        },
    ),
)
