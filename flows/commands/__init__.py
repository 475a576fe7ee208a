"""The commands behind `rlhf`: run, up, status, doctor, init, and what they print."""
