"""Readouts of rows (draws, top tokens, entropies, …), scores of texts, and particle steps."""
