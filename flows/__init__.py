"""Orchestration: what runs when and where, and what is left behind when something dies."""
