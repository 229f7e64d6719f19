"""Threads, forks, memory, progress, and an event loop on a background thread."""
