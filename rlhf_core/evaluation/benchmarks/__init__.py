"""Published benchmarks: lm-eval tasks, multiple choice, best of n for reward models."""
