"""Plans forward passes over a prefix tree, runs them, and makes rows and scores."""
