"""Language models, scalar heads on them, and their folders on disk."""
