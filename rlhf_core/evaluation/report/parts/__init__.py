"""What the parts of the report show, as plain data."""
