"""The form of ablation.yaml and of the metrics it may name."""
