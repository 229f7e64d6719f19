"""Ways for the new tokens of a forward pass of MLX to attend to those before them."""
