"""Groups of the evaluation's parameters."""
