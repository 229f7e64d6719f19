"""Ways for the new tokens of a forward pass to attend, and readings of the cached ones."""
