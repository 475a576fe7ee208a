"""The learning system of rlhf-pipeline: data, models, trainers, PPO-max, evaluation and gates."""

__version__ = "0.1.0"
