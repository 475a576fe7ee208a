"""Rollouts: prompts, sampled replies, and what policy, reference and critic say of them."""
