"""What is kept of registered versions, token ids, partial states and trials, and what goes."""
