"""Judges score replies: models behind one interface, and the synthetic world's true preference."""
