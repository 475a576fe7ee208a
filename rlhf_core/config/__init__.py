"""Typed parameters, one file per stage, so that a change concerns one stage alone."""
