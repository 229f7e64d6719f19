"""Which tests concern a file of the package: ``make test-of FILE=genlm_backend/passes/passes.py``.

Tests of what is pure come first where there are such: they say soonest what is wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PACKAGE = Path("genlm_backend")

_TREE = (
    "tests/prefix/test_tree.py",
    "tests/prefix/test_tree_histories.py",
    "tests/prefix/test_states.py",
    "tests/llm/hf/test_evaluator.py",
    "tests/llm/hf/test_round_histories.py",
    "tests/llm/hf/test_host_cache.py",
)
_STATES = (
    "tests/prefix/test_states.py",
    "tests/llm/hf/test_round_histories.py",
    "tests/llm/hf/test_states.py",
)

PURE: dict[str, tuple[str, ...]] = {
    "batching": ("tests/batching", "tests/llm/test_mock.py", "tests/trie/test_async_trie.py"),
    "prefix": ("tests/prefix", *_TREE[3:]),
    "prefix/budgets.py": ("tests/prefix/test_budgets.py", "tests/llm/hf/test_evaluator.py"),
    "prefix/codecs": (
        "tests/prefix/test_codecs.py",
        "tests/prefix/test_store.py",
        "tests/llm/hf/test_kv_cache_dtype.py",
    ),
    "prefix/kv_store.py": (
        "tests/prefix/test_store.py",
        "tests/prefix/test_mover.py",
        "tests/prefix/test_budgets.py",
        "tests/llm/hf/test_host_cache.py",
        "tests/llm/hf/test_kv_cache_dtype.py",
    ),
    "prefix/mlx_store.py": ("tests/prefix/test_mlx_store.py", "tests/llm/mlx/test_attend.py"),
    "prefix/node_loops.py": _TREE,
    "prefix/nodes.py": _TREE,
    "prefix/prefix_tree.py": _TREE,
    "prefix/slot_mover.py": ("tests/prefix/test_mover.py", "tests/llm/hf/test_host_cache.py"),
    "prefix/slots.py": ("tests/prefix/test_slots.py", *_TREE),
    "prefix/state_loops.py": _STATES,
    "prefix/states.py": _STATES,
    "trie": ("tests/trie",),
    "trie/async_trie.py": ("tests/trie/test_async_trie.py", "tests/trie/test_errors.py"),
    "trie/lm_weights.py": ("tests/trie/test_lm_weights.py",),
    "trie/visualize.py": ("tests/trie/test_visualize.py",),
    "tokenization/alphabet.py": ("tests/scoring", "tests/llm/test_contract_scores.py"),
    "passes/prefill_plan.py": (
        "tests/llm/hf/test_plan.py",
        "tests/llm/hf/test_evaluator.py",
        "tests/llm/hf/test_states.py",
    ),
    "attention/packing.py": (
        "tests/llm/hf/test_packing.py",
        "tests/llm/hf/test_steps.py",
        "tests/llm/hf/test_evaluator.py",
        "tests/llm/hf/test_pictures.py",
    ),
    "attention/block.py": (
        "tests/llm/hf/test_fused.py",
        "tests/llm/hf/test_shared_pass.py",
        "tests/llm/hf/test_sharing.py",
        "tests/llm/mlx/test_attend.py",
    ),
    "attention/operators.py": ("tests/llm/hf/test_shared_pass.py",),
    "attention/shared_pass.py": (
        "tests/llm/hf/test_shared_pass.py",
        "tests/llm/hf/test_steps.py",
        "tests/llm/hf/test_sharing.py",
        "tests/llm/hf/test_kv_cache_dtype.py",
    ),
    "attention/paths.py": ("tests/llm/hf/test_paths.py", "tests/llm/hf/test_packing.py"),
    "attention/reading.py": (
        "tests/llm/hf/test_paths.py",
        "tests/llm/hf/test_sharing.py",
        "tests/llm/hf/test_steps.py",
        "tests/llm/hf/test_shared_pass.py",
        "tests/llm/hf/test_round_histories.py",
    ),
    "passes/passes.py": (
        "tests/llm/hf/test_passes.py",
        "tests/llm/hf/test_evaluator.py",
        "tests/llm/hf/test_little_room.py",
        "tests/llm/hf/test_overflow.py",
        "tests/llm/hf/test_interrupted_pass.py",
        "tests/llm/hf/test_round_histories.py",
        "tests/llm/hf/test_scores.py",
        "tests/llm/hf/test_pictures.py",
        "tests/llm/hf/test_states.py",
    ),
    "generation/engine/roster.py": (
        "tests/generation/test_places.py",
        "tests/generation/test_roster.py",
        "tests/generation/test_engine_histories.py",
        "tests/generation/test_engine_admission.py",
    ),
    "backends/llama_cpp/sequences.py": ("tests/llm/llama_cpp/test_sequences.py",),
    "backends/vllm/sessions.py": ("tests/llm/vllm/test_sessions.py", "tests/llm/vllm"),
}
"""Files without a model, or folders of such → the tests that are to notice a change."""

OTHERS: dict[str, tuple[str, ...]] = {
    "": ("tests/test_package.py", "tests/test_docstrings.py", "tests/test_command_line.py"),
    "attention": ("tests/llm/hf/test_paths.py", "tests/llm/hf/test_sharing.py", "tests/llm/hf"),
    "attention/mlx": ("tests/llm/hf/test_shared_pass.py", "tests/llm/mlx"),
    "backends": ("tests/llm/test_loading.py", "tests/llm/test_mock.py", "tests/test_package.py"),
    "backends/hf": ("tests/llm/hf",),
    "backends/llama_cpp": ("tests/llm/llama_cpp",),
    "backends/mlx": ("tests/llm/mlx",),
    "backends/vllm": ("tests/llm/vllm",),
    "checks.py": ("tests/arguments", "tests/test_arguments.py"),
    "compat": ("tests/test_older_import_name.py",),
    "generation": ("tests/generation",),
    "llm": ("tests/test_package.py", "tests/test_older_import_name.py"),
    "model": ("tests/llm/test_context.py", "tests/llm/test_row.py", "tests/llm"),
    "passes": ("tests/llm/hf",),
    "prefix/mlx_states.py": ("tests/llm/mlx/test_states.py",),
    "remote": ("tests/llm/elsewhere",),
    "remote/replicas": ("tests/llm/replicas",),
    "scoring": ("tests/scoring",),
    "runtime": ("tests/batching", "tests/llm/test_threads.py", "tests/test_spare_memory.py"),
    "tokenization": ("tests/tokenization",),
    "vision": ("tests/llm/hf/test_pictures.py", "tests/llm/hf/test_picture_trouble.py"),
}


def concerning(path: Path) -> tuple[str, ...]:
    """Return the tests that concern a file of the package, the likeliest to fail first.

    Args:
        path: The file, from the package's folder.
    """
    known = {**OTHERS, **PURE}
    names = (str(path), *map(str, path.parents))
    found = (known["" if name == "." else name] for name in names if name in known or name == ".")
    return next(found)


def main() -> None:
    """Print the tests of the files that are named, from the project's folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    tests: dict[str, None] = {}
    for path in parser.parse_args().files:
        if not path.is_file() or path.parts[0] != str(PACKAGE):
            parser.error(f"{path} is no file of {PACKAGE}")
        tests.update(dict.fromkeys(concerning(path.relative_to(PACKAGE))))
    print(*tests)


if __name__ == "__main__":
    main()
