"""Groups of PPO's parameters."""
