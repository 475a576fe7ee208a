"""Checkpoints of unfinished training: files, location, and a remote store."""
