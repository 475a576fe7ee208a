"""Stages on work pools: the job that runs there, its submission, and hosts that do not share the workspace."""
