"""Training as plain functions: on models, texts and a reward function, without a workspace or an
orchestrator.
"""
