"""Stages as jobs of a work pool: submission and waiting, the job itself, and hosts that do not see
the workspace.
"""
