"""Metrics of replies and of what training cost: text, drift from the reference, perplexity, cost."""
