"""A policy that answers chat requests as OpenAI does: requests and responses, where its files come
from, sampling.
"""
