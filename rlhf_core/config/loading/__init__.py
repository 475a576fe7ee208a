"""Reading params.yaml: YAML, overlays and profiles, validation, and messages for mistakes."""
