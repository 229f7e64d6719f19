"""AsyncVirtualLM: a model evaluated by vLLM."""
