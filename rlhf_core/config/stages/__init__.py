"""Typed parameters of the stages, one file per stage."""
