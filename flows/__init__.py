"""Orchestration of the pipeline: its stages in order, where they run, their recovery, and the model
registry.
"""
