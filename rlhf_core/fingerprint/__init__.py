"""Code as a dependency: a hash of the definitions that a stage reaches.

Comments, docstrings and layout do not count.

A stage's code dependency in dvc.yaml is `.fingerprints/STAGE.txt`. It changes when a function,
class or module-level assignment changes that the stage reaches by name, and not when unreached code
in the same file does. How names are followed, and what of a definition counts, is said in
``reach``.
"""
