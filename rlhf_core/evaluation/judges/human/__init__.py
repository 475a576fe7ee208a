"""The human judge: pairs of replies exported blind for people, and their answers read back."""
