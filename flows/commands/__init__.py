"""The commands that operate pipeline and models, from init, run and status to promote and serve."""
