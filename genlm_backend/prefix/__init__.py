"""The cache of keys, values and recurrent states; it uses no event loop and no model."""
