"""Safety prompts: whether a model refuses harmful requests, and answers benign ones that look like them."""
