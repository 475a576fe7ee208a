"""The losses of PPO-max and their parts: a file per term."""
