"""Code whose names alone do not say what it reaches: more is taken than may be needed, never less."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.fingerprint.reach import Package

OTHER = "def f():\n    return 1\n"
CHANGED = ("p/other.py", "return 1", "return 2")
REGISTRY = "TABLE = {}\n\n\ndef enter(f):\n    TABLE[f.__name__] = f\n    return f\n"
USES_TABLE = "from p import other\nfrom p.registry import TABLE\n\n\ndef run():\n    return TABLE['f']()\n"

# Files beside the empty packages, and a change that must be noticed.
CASES = {
    "getattr of a module": (
        {"p/a.py": "from p import other\n\n\ndef run(name):\n    return getattr(other, name)()\n", "p/other.py": OTHER},
        CHANGED,
    ),
    "a module handed on": (
        {"p/a.py": "from p import other\n\n\ndef run():\n    return max(vars(other))\n", "p/other.py": OTHER},
        CHANGED,
    ),
    "a package handed on": (
        {"p/a.py": "import p\n\n\ndef run(name):\n    return getattr(p, name)\n", "p/other.py": OTHER},
        CHANGED,
    ),
    "a module named by a string": (
        {
            "p/a.py": "import importlib\n\n\ndef run():\n    return importlib.import_module('p.other').f()\n",
            "p/other.py": OTHER,
        },
        CHANGED,
    ),
    "a function named by a string": (
        {"p/a.py": "def run(load):\n    return load('p.other:f')\n", "p/other.py": OTHER},
        CHANGED,
    ),
    "the beginning of a module's name": (
        {
            "p/a.py": "import importlib\n\n\ndef run(x):\n    return importlib.import_module(f'p.inner.{x}')\n",
            "p/inner/__init__.py": "",
            "p/inner/other.py": OTHER,
        },
        ("p/inner/other.py", "return 1", "return 2"),
    ),
    "names imported on demand": (
        {
            "p/a.py": "import p\n\n\ndef run():\n    return p.f()\n",
            "p/__init__.py": "WHERE = {'f': 'p.other'}\n\n\ndef __getattr__(name):\n"
            "    import importlib\n\n    return getattr(importlib.import_module(WHERE[name]), name)\n",
            "p/other.py": OTHER,
        },
        CHANGED,
    ),
    "globals": (
        {"p/a.py": "def run(name):\n    return globals()[name]()\n\n\ndef f():\n    return 1\n"},
        ("p/a.py", "return 1", "return 2"),
    ),
    "eval": (
        {"p/a.py": "def run():\n    return eval('f()')\n\n\ndef f():\n    return 1\n"},
        ("p/a.py", "return 1", "return 2"),
    ),
    "classes found by their base": (
        {
            "p/a.py": "from p import other\nfrom p.base import Base\n\n\ndef run():\n"
            "    return Base.__subclasses__()\n",
            "p/base.py": "class Base:\n    pass\n",
            "p/other.py": "from p.base import Base\n\n\nclass Derived(Base):\n    def f(self):\n        return 1\n",
        },
        CHANGED,
    ),
    "classes that enter themselves": (
        {
            "p/a.py": USES_TABLE,
            "p/registry.py": "TABLE = {}\n\n\nclass Base:\n    def __init_subclass__(cls):\n"
            "        TABLE[cls.__name__] = cls\n",
            "p/other.py": "from p.registry import Base\n\n\nclass f(Base):\n    def f(self):\n        return 1\n",
        },
        CHANGED,
    ),
    "classes entered by a metaclass": (
        {
            "p/a.py": USES_TABLE,
            "p/registry.py": "TABLE = {}\n\n\nclass Meta(type):\n    def __init__(cls, *a):\n"
            "        TABLE['f'] = cls\n",
            "p/other.py": "from p.registry import Meta\n\n\nclass f(metaclass=Meta):\n    x = 1 and 'return 1'\n",
        },
        CHANGED,
    ),
    "objects entered by their constructor": (
        {
            "p/a.py": USES_TABLE,
            "p/registry.py": "TABLE = {}\n\n\nclass Base:\n    def __init__(self, f):\n        TABLE['f'] = f\n\n\n"
            "class Entry(Base):\n    pass\n",
            "p/other.py": f"from p.registry import Entry\n\n\n{OTHER}\n\nENTRY = Entry(f)\n",
        },
        CHANGED,
    ),
    "a value entered by a function": (
        {
            "p/a.py": USES_TABLE,
            "p/registry.py": REGISTRY,
            "p/other.py": f"from p.registry import enter\n\n\n{OTHER}\n\nentered = enter(f)\n",
        },
        CHANGED,
    ),
    "a value entered by a method": (
        {
            "p/a.py": USES_TABLE,
            "p/registry.py": REGISTRY,
            "p/other.py": f"from p.registry import TABLE\n\n\n{OTHER}\n\nbefore = TABLE.setdefault('f', f)\n",
        },
        CHANGED,
    ),
    "a call of what a call returns": (
        {
            "p/a.py": USES_TABLE,
            "p/registry.py": REGISTRY,
            "p/other.py": f"from p.registry import TABLE\n\n\n{OTHER}\n\nbefore = TABLE['all'].setdefault('f', f)\n",
        },
        CHANGED,
    ),
    "entries made in a loop": (
        {
            "p/a.py": USES_TABLE,
            "p/registry.py": REGISTRY,
            "p/other.py": f"from p.registry import TABLE\n\n\n{OTHER}\n\nfor name in 'f':\n    TABLE[name] = f\n",
        },
        CHANGED,
    ),
    "an imported list that is added to": (
        {
            "p/a.py": "from p import other\nfrom p.registry import LIST\n\n\ndef run():\n    return LIST\n",
            "p/registry.py": "LIST = []\n",
            "p/other.py": f"from p.registry import LIST\n\n\n{OTHER}\n\nLIST += [f]\n",
        },
        CHANGED,
    ),
    "a decorator in a class": (
        {
            "p/a.py": USES_TABLE,
            "p/registry.py": REGISTRY,
            "p/other.py": "from p.registry import enter\n\n\nclass C:\n    @enter\n"
            "    def f(self):\n        return 1\n",
        },
        CHANGED,
    ),
    "a call in a class body": (
        {
            "p/a.py": USES_TABLE,
            "p/registry.py": REGISTRY,
            "p/other.py": "from p.registry import enter\n\n\nclass C:\n    def f(self):\n"
            "        return 1\n\n    enter(f)\n",
        },
        CHANGED,
    ),
    "a library's register": (
        {
            "p/a.py": "from p import other\n\n\ndef run(copyreg):\n    return copyreg\n",
            "p/other.py": f"import atexit\n\n\n@atexit.register\n{OTHER}",
        },
        CHANGED,
    ),
    "a fallback": (
        {
            "p/a.py": "from p.other import f\n\n\ndef run():\n    return f()\n",
            "p/other.py": "try:\n    from fast import f\nexcept ImportError:\n    def f():\n        return 1\n",
        },
        CHANGED,
    ),
    "another definition of the same name": (
        {
            "p/a.py": "from p.other import f\n\n\ndef run():\n    return f()\n",
            "p/other.py": f"{OTHER}\n\ng = f\n\n\ndef f():\n    return g()\n",
        },
        CHANGED,
    ),
    "the else of a type checker's imports": (
        {
            "p/a.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from p.typed import f\nelse:\n"
            "    from p.other import f\n\n\ndef run():\n    return f()\n",
            "p/typed.py": OTHER,
            "p/other.py": OTHER,
        },
        CHANGED,
    ),
    "a name in a walrus": (
        {
            "p/a.py": "from p.other import f\n\n\ndef run():\n    return f\n",
            "p/other.py": "g = (f := 'return 1') + ''\n",
        },
        CHANGED,
    ),
    "a relative import": (
        {"p/a.py": "from .other import f\n\n\ndef run():\n    return f()\n", "p/other.py": OTHER},
        CHANGED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_change_behind_dynamic_code_is_noticed(case: str, tmp_path: Path) -> None:
    files, (file, old, new) = CASES[case]
    for name, text in ({"p/__init__.py": ""} | files).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = Package(tmp_path, "p").digest("p.a", "run")
    assert old in files[file]
    (tmp_path / file).write_text(files[file].replace(old, new))
    assert Package(tmp_path, "p").digest("p.a", "run") != before
