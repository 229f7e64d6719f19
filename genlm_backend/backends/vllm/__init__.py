"""Models evaluated by vLLM, through sessions that stay in its engine."""
