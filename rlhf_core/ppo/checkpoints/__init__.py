"""The state of an unfinished run on disk, and the journal of its rollbacks."""
