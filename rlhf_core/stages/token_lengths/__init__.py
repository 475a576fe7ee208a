"""Lengths of data in tokens, before training: tokenizer to count with, and limits."""
