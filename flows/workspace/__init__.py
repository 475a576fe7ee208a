"""A workspace folder: finding it, locking it, its recipe, and cleaning up what a dead run left in it."""
