"""People as judges: pairs of replies exported blind, their answers read back."""
