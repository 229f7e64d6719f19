"""Modules by which third-party programs use the library's models."""
