"""Models evaluated by vLLM, through sessions: requests that stay in its engine."""
