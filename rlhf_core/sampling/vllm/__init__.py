"""Sampling in a vLLM server: the sampler, its client, the server's process and the weights that it loads."""
