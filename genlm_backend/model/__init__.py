"""AsyncLM, the interface of models, and BatchedLM, which implements it with an evaluator."""
