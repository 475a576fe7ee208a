"""The record of what happened: MLflow runs behind a small class.

No other package of the core knows MLflow.
"""
