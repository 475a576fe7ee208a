"""Training: the loop, engines, checkpoints, and objectives of SFT and reward model."""
