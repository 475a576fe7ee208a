"""Commands on the registry: promote, roll back, approve, explain, history, retention."""
