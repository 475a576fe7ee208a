"""Heads on a backbone: scalar models, and policy and critic on one."""
