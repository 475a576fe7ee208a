"""Two sets of replies compared: win rates with intervals, by group, at equal lengths."""
