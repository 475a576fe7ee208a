"""Speed, as ratios measured in one run: of our sampler to transformers' own, of training to the
machine's limit.
"""
