"""Process control: a supervisor that stops every descendant, stop signals, file locks, retries, ports and clocks."""
