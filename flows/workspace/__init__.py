"""A workspace folder: how it is found, locked and cleaned up, its recipe, its git revision and its private files."""
