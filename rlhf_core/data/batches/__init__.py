"""Orders, mixtures and batches of rows, as pure functions of seed and epoch."""
