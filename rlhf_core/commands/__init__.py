"""Commands of the core that need no orchestration."""
