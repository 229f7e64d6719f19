"""Readouts: what is read off rows where these are."""
