"""Language models whose next-token log-probabilities can be awaited."""

from typing import TYPE_CHECKING

from genlm_backend.lazy import lazy_names

if TYPE_CHECKING:
    from genlm_backend.llm.absent import AsyncSGLTransformer
    from genlm_backend.llm.base import AsyncLM
    from genlm_backend.llm.batched import BatchedLM
    from genlm_backend.llm.context import Context
    from genlm_backend.llm.draw import Draw
    from genlm_backend.llm.drawing import Drawing
    from genlm_backend.llm.elsewhere.process import ProcessEvaluator
    from genlm_backend.llm.evaluator import (
        Evaluator,
        EvaluatorCounts,
        EvaluatorInfo,
        RestartableEvaluator,
        StatelessEvaluator,
    )
    from genlm_backend.llm.hf.model import AsyncTransformer
    from genlm_backend.llm.mlx.model import AsyncMlxLM
    from genlm_backend.llm.mock import MockAsyncLM
    from genlm_backend.llm.query import Adapter, Query
    from genlm_backend.llm.registry import load_model_by_name
    from genlm_backend.llm.replicas.model import AsyncReplicas
    from genlm_backend.llm.row import Row, rows_of_logits, scores_of_logits
    from genlm_backend.llm.sampling import Sampled
    from genlm_backend.llm.scoring import Scoring
    from genlm_backend.llm.statistics import LMStatistics
    from genlm_backend.llm.vllm.model import AsyncVirtualLM

__all__ = [
    "Adapter",
    "AsyncLM",
    "AsyncMlxLM",
    "AsyncReplicas",
    "AsyncSGLTransformer",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "BatchedLM",
    "Context",
    "Draw",
    "Drawing",
    "Evaluator",
    "EvaluatorCounts",
    "EvaluatorInfo",
    "LMStatistics",
    "MockAsyncLM",
    "ProcessEvaluator",
    "Query",
    "RestartableEvaluator",
    "Row",
    "Sampled",
    "Scoring",
    "StatelessEvaluator",
    "load_model_by_name",
    "rows_of_logits",
    "scores_of_logits",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "Adapter": "genlm_backend.llm.query",
        "AsyncLM": "genlm_backend.llm.base",
        "AsyncMlxLM": "genlm_backend.llm.mlx.model",
        "AsyncReplicas": "genlm_backend.llm.replicas.model",
        "AsyncSGLTransformer": "genlm_backend.llm.absent",
        "AsyncTransformer": "genlm_backend.llm.hf.model",
        "AsyncVirtualLM": "genlm_backend.llm.vllm.model",
        "BatchedLM": "genlm_backend.llm.batched",
        "Context": "genlm_backend.llm.context",
        "Draw": "genlm_backend.llm.draw",
        "Drawing": "genlm_backend.llm.drawing",
        "Evaluator": "genlm_backend.llm.evaluator",
        "EvaluatorCounts": "genlm_backend.llm.evaluator",
        "EvaluatorInfo": "genlm_backend.llm.evaluator",
        "LMStatistics": "genlm_backend.llm.statistics",
        "MockAsyncLM": "genlm_backend.llm.mock",
        "ProcessEvaluator": "genlm_backend.llm.elsewhere.process",
        "Query": "genlm_backend.llm.query",
        "RestartableEvaluator": "genlm_backend.llm.evaluator",
        "Row": "genlm_backend.llm.row",
        "Sampled": "genlm_backend.llm.sampling",
        "Scoring": "genlm_backend.llm.scoring",
        "StatelessEvaluator": "genlm_backend.llm.evaluator",
        "load_model_by_name": "genlm_backend.llm.registry",
        "rows_of_logits": "genlm_backend.llm.row",
        "scores_of_logits": "genlm_backend.llm.row",
    },
)
