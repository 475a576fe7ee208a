"""Judging a policy: judges, comparisons with intervals, checkpoint selection, the regression set,
the report.
"""
