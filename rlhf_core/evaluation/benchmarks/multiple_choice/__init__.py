"""Multiple-choice questions, answered by log-likelihood: what PPO costs in knowledge (alignment tax)."""
