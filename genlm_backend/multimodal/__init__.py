"""Pictures in front of a context."""
