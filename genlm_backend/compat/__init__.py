"""Names of genlm-backend 0.3.1, and of the release after it, that are for its clients alone."""
