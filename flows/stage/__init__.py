"""One stage run through DVC under the supervisor, its outcome, and the hash of what it computes."""
