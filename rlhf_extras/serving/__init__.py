"""The server that answers chat requests as OpenAI does, and the command that starts that of vLLM
instead.
"""
