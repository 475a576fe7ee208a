"""Process control: a supervisor that stops every descendant, stop signals, retries and clocks."""
