"""PPO-max: rollouts, rewards, advantages, objectives and the loop around them (algorithms.md §3 to 8)."""
