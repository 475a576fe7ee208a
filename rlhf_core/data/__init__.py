"""Rows, formats, validation, splits, batches and the chat template."""
