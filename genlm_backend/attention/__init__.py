"""Ways for the new tokens of a forward pass to attend, and plans of the cached ones."""
