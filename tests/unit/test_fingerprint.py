"""What makes a stage stale: code that its module reaches, and nothing else."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

PPO_ONLY = "objectives"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small package under the same rules: stage a uses lib.one, stage b uses lib.one and lib.two."""
    files = {
        "rlhf_core/__init__.py": '"""P."""\n',
        "rlhf_core/stages/__init__.py": "",
        "rlhf_core/stages/a.py": "from rlhf_core.lib import one\n",
        "rlhf_core/stages/b.py": "import rlhf_core.lib.two\n",
        "rlhf_core/lib/__init__.py": "",
        "rlhf_core/lib/one.py": 'def f(x):\n    """Doc."""\n    return x + 1\n',
        "rlhf_core/lib/two.py": "from rlhf_core.lib.one import f\nfrom rlhf_core.progress import track\n",
        "rlhf_core/progress.py": "def track(): return 1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    module = importlib.import_module("rlhf_core.fingerprint")
    monkeypatch.setattr(module, "package_root", lambda: tmp_path)
    caches = (module._file_of, module._tree, module._imports, module._module_digest)

    def prints() -> tuple[str, str]:
        for cache in caches:
            cache.cache_clear()
        return module.fingerprint("a"), module.fingerprint("b")

    yield tmp_path / "rlhf_core", prints
    for cache in caches:
        cache.cache_clear()


def test_comments_docstrings_and_layout_change_nothing(package) -> None:
    root, prints = package
    before = prints()
    (root / "lib/one.py").write_text('"""New."""\n# why\ndef f(x):\n    """Other words."""\n\n    return (x + 1)\n')
    assert prints() == before


def test_code_reaches_every_stage_that_imports_it(package) -> None:
    root, prints = package
    a, b = prints()
    (root / "lib/one.py").write_text("def f(x):\n    return x + 2\n")
    assert prints()[0] != a and prints()[1] != b


def test_code_of_one_stage_leaves_the_others_alone(package) -> None:
    root, prints = package
    a, b = prints()
    (root / "lib/two.py").write_text("from rlhf_core.lib.one import f\ny = 1\n")
    assert prints()[0] == a and prints()[1] != b


def test_reporting_code_is_neutral(package) -> None:
    root, prints = package
    before = prints()
    (root / "progress.py").write_text("def track(): return 2\n")
    assert prints() == before
