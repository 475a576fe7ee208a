"""PPO-max: rollouts, rewards, advantages, objectives and the loop around them (ALGORITHMS sections 3 to 8)."""
