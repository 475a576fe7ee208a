"""The record of what happened: MLflow runs behind a small class. The only package of the core that
knows MLflow.
"""
