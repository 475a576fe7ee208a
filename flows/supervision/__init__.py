"""Processes: the supervisor that leaves no child behind, stop signals, ports, clocks, child environments."""
