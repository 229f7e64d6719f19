"""Values of every kind, and every public callable with its options."""
