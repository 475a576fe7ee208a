"""What the pipeline does not need to run: each extra comes through the same doors as a plugin of
others.
"""
