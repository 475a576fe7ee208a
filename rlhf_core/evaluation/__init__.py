"""Judging a policy: judges, comparisons, checkpoint selection, the regression set, the report."""
