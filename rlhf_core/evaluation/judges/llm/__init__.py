"""The LLM judge: which of two replies a language model prefers, asked over HTTP."""
