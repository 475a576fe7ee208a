"""How much memory each stage needs per GPU, by role and phase, before anything is loaded; and what
to change.
"""
