"""Talking to a model in a terminal."""
