"""Reward sources: what scores a rollout, behind one protocol, mixed by weights."""
