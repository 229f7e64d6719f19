"""Facilities that programs run on: threads, forks, memory, one event loop on a thread."""
