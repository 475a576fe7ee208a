"""Validation of raw rows: checks, Great Expectations over them, the quarantine, and where each row
came from.
"""
