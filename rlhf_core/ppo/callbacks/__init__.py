"""What happens around a PPO iteration: checkpoint selection, health monitoring and rollback."""
