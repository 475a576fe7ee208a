"""Formats: records of a known shape as prompt and replies."""
