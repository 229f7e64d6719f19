"""Grammars for constrained output by llguidance, and JSON schemas rewritten for it."""
