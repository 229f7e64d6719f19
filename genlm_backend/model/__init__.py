"""Models whose next-token log-probabilities are awaited, over an evaluator of any kind."""
