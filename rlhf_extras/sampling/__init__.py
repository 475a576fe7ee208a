"""Sampling by a vLLM server: its settings, the server, and how it gets the weights."""
