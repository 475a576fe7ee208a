"""What DVC knows: the stage graph, recorded hashes, what is stale; always asked in a child process."""
