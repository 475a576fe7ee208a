"""Data: row types, readers, validation, splits, batches, chat template and statistics of text."""
