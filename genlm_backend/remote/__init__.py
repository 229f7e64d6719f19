"""Remote evaluators: in another process, in a Ray actor, or as several replicas."""
