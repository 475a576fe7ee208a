"""``rlhf compare``: the results of finished runs side by side."""
