"""What a version is registered with: gates, data card, lineage, and the description of its run."""
