"""Rules about the whole set of clean rows: leakage, near duplicates, contamination, language, statistics of pairs."""
