"""The study of the paper's claims: variants of PPO over several seeds, intervals, verdicts, a page
and figures.
"""
