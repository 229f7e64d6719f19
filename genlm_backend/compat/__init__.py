"""Names of genlm-backend 0.3.1 and of the release after it, kept for programs that use them."""
