"""What MLflow keeps beside a registered policy, changed by somebody else: one line where it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.errors import ModelError
from rlhf_extras.serving.served_policy import served_source

from .conftest import Registry

SAMPLING = "flavors: {{python_function: {{config: {{sampling: {}}}}}}}"
CHANGED = {
    "gone": None,
    "empty": "",
    "a list": "[1, 2]",
    "no YAML": "a: b: c: [",
    "no flavours": "flavors: 5",
    "no settings": SAMPLING.format("null"),
    "a list of settings": SAMPLING.format("[1]"),
    "a word": SAMPLING.format("{temperature: hot}"),
    "no number": SAMPLING.format("{temperature: .nan}"),
    "codes": SAMPLING.format('{"\\e[2J": 1}'),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_package_that_was_changed_is_not_served(
    name: str, registry: Registry, contest: Path
) -> None:
    (contest / "dvc.yaml").write_text("stages: {}\n")
    text = CHANGED[name]
    for folder in (registry.folder / "artifacts").iterdir():
        if text is not None:
            (folder / "MLmodel").write_text(text)
    source = served_source(contest).source
    with pytest.raises(ModelError, match="does not say how the policy was judged") as refused:
        source.files(source.latest())
    assert "\n" not in str(refused.value)
