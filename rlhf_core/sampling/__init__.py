"""Sampling replies from the policy, and the distribution they are drawn from."""
