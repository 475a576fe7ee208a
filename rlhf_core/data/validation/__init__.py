"""Validation of raw rows: expectations, rules about the whole set, and the quarantine."""
