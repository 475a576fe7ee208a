"""Figures and numbers as report and data card show them."""
