"""Code whose names alone do not say what it reaches: more is taken than may be needed, or it is
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.fingerprint.reach import Package

F = "def f():\n    return 1\n"
CALLS_F = "\n\n\ndef run():\n    return f()\n"
USES_TABLE = (
    "from p import other\nfrom p.registry import TABLE\n\n\ndef run():\n    return TABLE['f']()\n"
)
IMPORTS_TABLE = f"from p.registry import TABLE\n\n\n{F}\n\n"


def case(stage: str, other: str = "", **modules: str) -> dict[str, str]:
    """The modules of a package, of which the last holds what is changed."""
    return {"a": stage, **modules, **({"other": other} if other else {})}


CASES = {
    "entries made in a loop": case(
        USES_TABLE,
        f"{IMPORTS_TABLE}for name in 'f':\n    TABLE[name] = f\n",
        registry="TABLE = {}\n",
    ),
    "an imported list that is added to": case(
        "from p import other\nfrom p.registry import LIST\n\n\ndef run():\n    return LIST\n",
        f"from p.registry import LIST\n\n\n{F}\n\nLIST += [f]\n",
        registry="LIST = []\n",
    ),
    "a fallback": case(
        f"from p.other import f{CALLS_F}",
        "try:\n    from fast import f\nexcept ImportError:\n    def f():\n        return 1\n",
    ),
    "another definition of the same name": case(
        f"from p.other import f{CALLS_F}", f"{F}\n\ng = f\n\n\ndef f():\n    return g()\n"
    ),
    "the else of a type checker's imports": case(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from p.typed import f\nelse:\n"
        f"    from p.other import f{CALLS_F}",
        F,
        typed=F,
    ),
    "a name in a walrus": case(
        "from p.other import f\n\n\ndef run():\n    return f\n", "g = (f := 'return 1') + ''\n"
    ),
    "a relative import": case(f"from .other import f{CALLS_F}", F),
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_behind_dynamic_code_is_noticed(name: str, tmp_path: Path) -> None:
    for module, text in ({"__init__": ""} | CASES[name]).items():
        path = tmp_path / "p" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = Package(tmp_path, "p").digest("p.a", "run")
    assert "return 1" in text
    path.write_text(text.replace("return 1", "return 2"))
    assert Package(tmp_path, "p").digest("p.a", "run") != before


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            "from p import other\n\n\ndef run(name):\n    return getattr(other, name)()\n",
            "p.other is used as a value",
        ),
        ("import p\n\n\ndef run(name):\n    return getattr(p, name)\n", "p is used as a value"),
        ("from p import other\n\n\ndef run():\n    return other.g()\n", "p.other defines no g"),
    ],
)
def test_what_cannot_be_followed_is_refused(stage: str, message: str, tmp_path: Path) -> None:
    for module, text in {"__init__": "", "a": stage, "other": F}.items():
        path = tmp_path / "p" / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with pytest.raises(LookupError, match=message):
        Package(tmp_path, "p").digest("p.a", "run")
