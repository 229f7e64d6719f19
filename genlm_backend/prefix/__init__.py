"""Keys, values and running states that have been computed already; no event loop, no model."""
