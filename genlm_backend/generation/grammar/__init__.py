"""Grammars of constrained output, and the grammars that hold a text to a JSON schema."""
