"""The Prefect server: starting and watching one, its work pools and workers, its flow runs and
automations.
"""
