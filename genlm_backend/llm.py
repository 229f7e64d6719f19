"""Language models with awaitable next-token log-probabilities, and the types that they use."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.backends.bundled import bundled_directory
    from genlm_backend.backends.hf.async_transformer import AsyncTransformer
    from genlm_backend.backends.llama_cpp.async_llama_cpp_lm import AsyncLlamaCppLM
    from genlm_backend.backends.mlx.async_mlx_lm import AsyncMlxLM
    from genlm_backend.backends.mock import MockAsyncLM, MockEvaluator
    from genlm_backend.backends.registry import load_model_by_name
    from genlm_backend.backends.vllm.async_virtual_lm import AsyncVirtualLM, VLLMLoader
    from genlm_backend.compat.replaced import AsyncSGLTransformer
    from genlm_backend.model.async_lm import AsyncLM
    from genlm_backend.model.batched_lm import BatchedLM
    from genlm_backend.model.lm_statistics import LMStatistics
    from genlm_backend.particles.particle_group import Draws, ParticleTop, Rows
    from genlm_backend.queries.context import Context
    from genlm_backend.queries.evaluator import (
        Evaluator,
        EvaluatorCounts,
        EvaluatorInfo,
        RestartableEvaluator,
        StatelessEvaluator,
    )
    from genlm_backend.queries.query import Adapter, RowQuery
    from genlm_backend.queries.row import Row, rows_of_logits, scores_of_logits
    from genlm_backend.readouts.draw import Draw, PackedMask
    from genlm_backend.readouts.readout import Readout
    from genlm_backend.readouts.sample_readout import SampleReadout
    from genlm_backend.readouts.sampling import Sampled
    from genlm_backend.readouts.score_query import ScoreQuery, TokenScores
    from genlm_backend.readouts.token_readouts import TopTokens
    from genlm_backend.remote.process_evaluator import ProcessEvaluator
    from genlm_backend.remote.ray_evaluator import RayEvaluator
    from genlm_backend.remote.replicas.async_replicas import AsyncReplicas

__all__ = [
    "Adapter",
    "AsyncLM",
    "AsyncLlamaCppLM",
    "AsyncMlxLM",
    "AsyncReplicas",
    "AsyncSGLTransformer",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "BatchedLM",
    "Context",
    "Draw",
    "Draws",
    "Evaluator",
    "EvaluatorCounts",
    "EvaluatorInfo",
    "LMStatistics",
    "MockAsyncLM",
    "MockEvaluator",
    "PackedMask",
    "ParticleTop",
    "ProcessEvaluator",
    "RayEvaluator",
    "Readout",
    "RestartableEvaluator",
    "Row",
    "RowQuery",
    "Rows",
    "SampleReadout",
    "Sampled",
    "ScoreQuery",
    "StatelessEvaluator",
    "TokenScores",
    "TopTokens",
    "VLLMLoader",
    "bundled_directory",
    "load_model_by_name",
    "rows_of_logits",
    "scores_of_logits",
]

__getattr__, __dir__ = lazy_names(globals())
