"""Verifiable prompts: properties that a reply must have, checked instead of judged."""
