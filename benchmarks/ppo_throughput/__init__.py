"""Tokens per second of a PPO iteration, phase by phase, on this machine."""
