"""Engine: generation requests with a result queue each, batched together."""
