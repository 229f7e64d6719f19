"""Pictures at the beginning of a context."""
