"""Lazily imported public names (PEP 562), so that importing a package loads nothing heavy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

_PUBLIC: Final = {
    "batching.batched": "Batched batched",
    "backends.bundled": "bundled_directory",
    "backends.hf.async_transformer": "AsyncTransformer",
    "backends.llama_cpp.async_llama_cpp_lm": "AsyncLlamaCppLM",
    "backends.mlx.async_mlx_lm": "AsyncMlxLM",
    "backends.mock": "MockAsyncLM MockEvaluator",
    "backends.registry": "load_model_by_name",
    "backends.vllm.async_virtual_lm": "AsyncVirtualLM VLLMLoader",
    "compat.batching": "batch_abandoned batch_stats fail_futures join_batch take_batch_stats",
    "compat.draw": "DRAW_METHODS draw_from gumbel_max inverse_cdf logp_at logsumexp_from "
    "multinomial set_draw_method temper",
    "compat.output_cache": "OutputCache",
    "compat.replaced": "AsyncSGLTransformer BackendScheduler HAS_MLX HAS_SGL HAS_VLLM Query "
    "TokenTrie bytes_to_strs check_byte_decoder get_byte_tokens_from_byte_decoder "
    "get_byte_tokens_from_sp get_byte_vocab",
    "errors": "BatchAbandoned=QueryDroppedError ByteDecoderError=TokenizerDecodeError "
    "ByteVocabError=TokenizerDecodeError",
    "generation.async_glm": "AsyncGLM",
    "generation.config": "GenerationConfig MultiMediaInfo",
    "generation.constraint": "Constraint",
    "generation.engine.engine": "Engine",
    "generation.engine.model_entry": "ModelState",
    "generation.engine.request": "GenerationRequest ResultQueue",
    "generation.engine.runtime_config": "RuntimeConfig",
    "generation.generated": "GeneratedElements GeneratedToken Generation GenerationStatus Piece "
    "RequestStatistics",
    "generation.generation": "generate generate_sync stream",
    "generation.smc": "WeightedTexts smc smc_sync",
    "model.async_lm": "AsyncLM",
    "model.batched_lm": "BatchedLM",
    "particles.particle_group": "Draws ParticleGroup ParticleTop Rows",
    "queries.context": "Context",
    "readouts.draw": "Draw PackedMask",
    "readouts.sample_readout": "SampleReadout",
    "queries.evaluator": "Evaluator EvaluatorCounts EvaluatorInfo RestartableEvaluator "
    "StatelessEvaluator",
    "model.lm_statistics": "LMStatistics",
    "queries.query": "Adapter RowQuery UNKNOWN_ADAPTER",
    "readouts.readout": "Readout",
    "queries.row": "Row rows_of_logits scores_of_logits",
    "readouts.sampling": "Sampled",
    "readouts.score_query": "ScoreQuery TokenScores",
    "readouts.token_readouts": "TopTokens",
    "remote.process_evaluator": "ProcessEvaluator",
    "remote.ray_evaluator": "RayEvaluator",
    "remote.replicas.async_replicas": "AsyncReplicas",
    "scoring.search": "Continuation Continuations PrefixLogprob continuations continuations_sync "
    "prefix_logprob prefix_logprob_sync",
    "scoring.surprisals": "Surprisal Surprisals SurprisalsOfTexts surprisal surprisal_sync",
    "tokenization.token": "Token",
    "tokenization.vocab": "decode_vocab",
    "trie.async_trie": "AsyncTokenCharacterTrie TrieStatistics",
    "trie.base": "VocabularyTrie",
    "trie.lm_weights": "lm_trie_weights",
    "trie.parallel": "ParallelTokenCharacterTrie",
    "trie.sequential": "TokenCharacterTrie",
}
"""Module of ``genlm_backend`` → its public names, which are imported at their first use.

``Other=Name`` exports the module's ``Name`` as ``Other``.
"""

_HOMES: Final = {
    name: (f"genlm_backend.{module}", original or name)
    for module, names in _PUBLIC.items()
    for name, _, original in (each.partition("=") for each in names.split())
}


def lazy_names(
    namespace: dict[str, Any], submodules: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package, given its globals and submodules."""
    package = namespace["__name__"]
    names = {name: _HOMES[name] for name in namespace["__all__"] if name in _HOMES}

    def __getattr__(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")  # the import sets the attribute
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = names[name]
        value = getattr(importlib.import_module(module), original)
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*namespace, *names, *submodules} - {"TYPE_CHECKING", "lazy_names"})

    return __getattr__, __dir__
