"""Running a stage: its contract and name, the runner, and the launcher of several ranks."""
