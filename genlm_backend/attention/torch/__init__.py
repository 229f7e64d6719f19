"""Ways for the new tokens of a forward pass of torch to attend to those before them."""
