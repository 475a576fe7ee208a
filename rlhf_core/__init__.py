"""The learning system of rlhf-pipeline: data, models, trainers, PPO-max, evaluation and gates."""

__version__ = "0.2.0"
