"""Advantages: estimators with and without a critic, and their normalisation."""
