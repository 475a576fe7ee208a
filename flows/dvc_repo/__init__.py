"""Access to DVC, which runs in child processes: its graph, hashes, changes and root."""
