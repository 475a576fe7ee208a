"""Running one stage: through DVC under a supervisor, its outcome, and a hash of what it computes."""
