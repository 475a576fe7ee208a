"""How a stage is run: its contract, names, launcher over ranks, and runner."""
