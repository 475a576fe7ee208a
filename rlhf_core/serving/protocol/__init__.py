"""The chat API of OpenAI as data: requests, responses, errors, and who may ask. Nothing here knows of a model."""
