"""What the runs of an ablation amount to: results, intervals, verdicts, a table and figures."""
