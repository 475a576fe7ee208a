"""Files: written atomically, locked, matched, fetched, collected as garbage."""
