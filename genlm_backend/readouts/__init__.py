"""Readouts of rows (draws, top tokens, entropies, log-masses), and scores of texts."""
