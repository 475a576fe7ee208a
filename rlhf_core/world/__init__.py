"""The embedded world: a small English dialogue world whose true preference is known."""
