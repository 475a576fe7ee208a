"""`rlhf ablate`: named variants with several seeds, each brought up to date by DVC in a workspace of its own."""
