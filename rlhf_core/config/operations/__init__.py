"""Settings of what surrounds training. They never make a stage stale."""
