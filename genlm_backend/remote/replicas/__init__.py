"""Replicas: several evaluators of one model, and the routing of contexts between them."""
