"""Queries to a model: contexts, rows, and the interface of the backends that answer them."""
