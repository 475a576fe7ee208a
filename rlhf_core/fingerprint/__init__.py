"""Code as a dependency: a hash of the definitions that a stage reaches, blind to comments, docstrings and layout.

A stage's code dependency in dvc.yaml is `.fingerprints/STAGE.txt`. It changes when a function, class or module-level
assignment changes that the stage reaches by name, and not when unreached code in the same file does. How names are
followed, and what of a definition counts, is said in ``reach``.
"""

from rlhf_core.fingerprint.modules import bare_code
from rlhf_core.fingerprint.stages import (
    FOLDER,
    fingerprint,
    remembered_fingerprints,
    stage_module_name,
    write_fingerprints,
)
from rlhf_core.fingerprint.tracked_files import write_sources

__all__ = [
    "FOLDER",
    "bare_code",
    "fingerprint",
    "remembered_fingerprints",
    "stage_module_name",
    "write_fingerprints",
    "write_sources",
]
