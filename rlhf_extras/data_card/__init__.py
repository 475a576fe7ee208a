"""The data card: one page on what the data of a run are, where they come from, and what was found."""
