"""Health rules: their form, the defaults, and changes by name."""
