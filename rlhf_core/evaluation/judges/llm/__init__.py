"""The LLM judge: which of two replies a language model behind an OpenAI-compatible endpoint
prefers.
"""
