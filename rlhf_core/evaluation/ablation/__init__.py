"""The results of an ablation: end values, intervals over seeds, verdicts on claims, a page and figures."""
