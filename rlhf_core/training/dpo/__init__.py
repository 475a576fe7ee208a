"""Direct preference optimisation: a policy from preference pairs, without reward model or sampling."""
