"""Names of genlm-backend 0.3.1 that have no use here."""
