"""Keys, values and recurrent states that have been computed already; no event loop, no model."""
