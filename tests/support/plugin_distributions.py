"""Distributions with entry points, made for one test and known to this process alone."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.plugins import plugins_of

Install = Callable[..., None]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"


def example(heading: str) -> str:
    """The code below a heading of docs/plugins.md."""
    text = DOCS.read_text(encoding="utf-8")
    found = re.search(rf"^## {heading}\n.*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    """The message, of one line, that a call refuses settings with."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def installer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return what makes a distribution with entry points of a group, and a module of its own."""

    def make(distribution: str, group: str, entries: dict[str, str], **modules: str) -> None:
        place = folder / distribution
        metadata = place / f"{distribution}-1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Name: {distribution}\nVersion: 1\n")
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
        for name, text in modules.items():
            (place / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(place))
        importlib.invalidate_caches()
        plugins_of.cache_clear()

    return make
