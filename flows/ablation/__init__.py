"""``rlhf ablate``: variants of the recipe with several seeds each, run by DVC in workspaces of their own."""
