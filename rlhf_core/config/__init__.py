"""Typed parameters: one file per stage, so that a change to one stage's settings concerns that
stage alone.
"""
