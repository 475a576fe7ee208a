"""Training: the resumable loop, engines, checkpoints, and the objectives of SFT and the reward
model.
"""
