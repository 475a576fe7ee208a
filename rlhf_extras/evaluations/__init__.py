"""Evaluations beside the judges': opponents of third parties, and multiple-choice questions."""
