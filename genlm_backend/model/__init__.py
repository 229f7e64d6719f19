"""AsyncLM, the interface of models, and BatchedLM, which implements it over an evaluator."""
