"""Collect rows from files, URLs and the hub, and derive kinds of rows from others."""
