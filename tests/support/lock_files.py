"""What the lock files at the root of the repository pin: versions, and the hashes of the files that
pip may take.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)(?: ; [^\\\n]+)?((?: \\\n    --hash=\S+)*)$", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    """The versions of the packages that a lock names, by their names in lower case with hyphens.

    A line that is none, or a package that is named twice, fails.
    """
    text = (ROOT / name).read_text()
    assert not PIN.sub("", text).strip()
    found = [(_normal(package), version) for package, version, _ in PIN.findall(text)]
    assert len(dict(found)) == len(found)
    return dict(found)


def hashes(name: str) -> dict[str, list[str]]:
    """The SHA-256 of the files that pip may take, by package; packages without any are left out."""
    listed = {
        _normal(package): digests for package, _, digests in PIN.findall((ROOT / name).read_text())
    }
    return {
        package: re.findall("--hash=sha256:(\\S+)", digests)
        for package, digests in listed.items()
        if digests
    }


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()
