"""Readers of data files: containers give records, shapes make prompts and replies of them."""
