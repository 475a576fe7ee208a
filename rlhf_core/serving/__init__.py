"""A policy that answers chat requests as OpenAI does.

Requests and responses, where its files come from, and sampling.
"""
