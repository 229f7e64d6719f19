"""Engine: runs generation requests, batched together; each request has a queue of its results."""
