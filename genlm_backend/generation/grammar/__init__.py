"""Grammars for constrained output, among them those that enforce a JSON schema."""
