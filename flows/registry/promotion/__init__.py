"""Promotion and rollback: matches, what stands in their way, and the decision."""
