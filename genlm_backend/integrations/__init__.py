"""Programs of others that use a model of this library."""
