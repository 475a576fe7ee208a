"""Finished runs side by side: ``rlhf compare``."""
