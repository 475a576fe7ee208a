"""Data files without a pipeline: describe, compare, convert."""
