"""Commands that talk to a model or put it behind an API."""
