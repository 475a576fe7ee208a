"""The pipeline as a Prefect flow: scheduling of stages, events, artifacts, registration at the end."""
