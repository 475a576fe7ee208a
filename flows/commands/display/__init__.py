"""The display of a run: a live table of stages on a terminal, plain lines elsewhere."""
