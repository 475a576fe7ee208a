"""The commands that operate the pipeline: run, up, init, status and doctor."""
