"""Data files described, compared with each other, and written in one format."""
