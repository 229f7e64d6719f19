"""Evaluators that live somewhere else: in a process of their own."""
