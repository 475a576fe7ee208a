"""Public benchmarks: reward models on RewardBench 2, policies by lm-evaluation-harness."""
