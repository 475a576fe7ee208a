"""Registered versions: written, signed, found, served and deleted."""
