"""Ranks, preemption, progress and retries: what any long work needs."""
