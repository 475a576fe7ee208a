"""From raw scores to token rewards: normalisation, scaling, clip and the KL penalty."""
