"""The pipeline as a Prefect flow: scheduling of stages, checks before submission, events,
artifacts, registration.
"""
