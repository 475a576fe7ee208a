"""Readers of data files: containers (files to records), shapes (records to prompt and replies),
turns (messages).
"""
