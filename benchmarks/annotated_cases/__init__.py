"""Is it worth more to annotate bad cases than random pairs? ``python -m benchmarks.annotated_cases --seeds 1 2 3 4 5``.

For each seed, SFT and policy of a finished workspace reply to training prompts. Equally many bad cases and random pairs
of that one pool are labelled by the simulated annotators of the synthetic world and imported as people's answers are,
each set into a workspace of its own, whose reward model is trained anew. All reward models are measured against gold on
the same pairs of replies to held-out prompts; with ``--ppo`` the policies that they lead to are measured as well.
"""
