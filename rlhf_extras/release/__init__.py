"""Models on their way out: a registered policy as a Hugging Face folder with a model card, on disk
or on a hub.
"""
