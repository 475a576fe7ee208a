"""What a model decodes with: its layers, its attention to what was written, and the cache of that."""
