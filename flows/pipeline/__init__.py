"""The pipeline as a Prefect flow: stages, checks before them, events, artifacts, registration."""
