"""Training as plain functions, without a workspace or an orchestrator."""
