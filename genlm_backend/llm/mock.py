"""MockAsyncLM and its evaluator under an older name of their module."""

from genlm_backend.backends.mock import MockAsyncLM as MockAsyncLM
from genlm_backend.backends.mock import MockEvaluator as MockEvaluator
