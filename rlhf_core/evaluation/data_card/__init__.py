"""The data card: one page on what the data of a run is, where it comes from, and what was found in
it.
"""
