"""A policy behind HTTP with the chat API of OpenAI: requests and responses, sampling, reloading, limits, metrics."""
