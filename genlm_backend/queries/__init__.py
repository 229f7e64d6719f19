"""Queries to a model: contexts, rows, and the interface of what answers."""
