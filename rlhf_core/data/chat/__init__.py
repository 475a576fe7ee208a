"""Dialogues as tokens: chat templates, masks, special tokens."""
