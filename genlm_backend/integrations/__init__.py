"""Integrations of third-party programs with the library's models."""
