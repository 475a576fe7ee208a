"""Reward-model training, its evaluation, baselines and plots."""
