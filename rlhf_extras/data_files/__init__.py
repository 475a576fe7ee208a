"""Data files compared with each other and written in one format."""
