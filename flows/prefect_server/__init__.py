"""The Prefect server this project talks to: its services and workers, work pools, flow runs and automations."""
