"""Who may change a registered model and by what rules: its lock, its terms of promotion, the record of its changes."""
