"""What the new tokens of a forward pass attend to, and how the cached ones of it are read."""
