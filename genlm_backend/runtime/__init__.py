"""What programs run on: threads, locks across forks, memory, one event loop on a thread."""
