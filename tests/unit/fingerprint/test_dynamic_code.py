"""Code whose names alone do not say what it reaches: more is taken than may be needed, never less."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.fingerprint.reach import Package

F = "def f():\n    return 1\n"
CALLS_F = "\n\n\ndef run():\n    return f()\n"
USES_TABLE = "from p import other\nfrom p.registry import TABLE\n\n\ndef run():\n    return TABLE['f']()\n"
TABLE = "TABLE = {}\n\n\n"
ENTER = f"{TABLE}def enter(f):\n    TABLE[f.__name__] = f\n    return f\n"
IMPORTS_ENTER, IMPORTS_TABLE = "from p.registry import enter\n\n\n", f"from p.registry import TABLE\n\n\n{F}\n\n"


def case(stage: str, other: str = "", **modules: str) -> dict[str, str]:
    """The modules of a package, of which the last holds what is changed."""
    return {"a": stage, **modules, **({"other": other} if other else {})}


CASES = {
    "getattr of a module": case("from p import other\n\n\ndef run(name):\n    return getattr(other, name)()\n", F),
    "a module handed on": case("from p import other\n\n\ndef run():\n    return max(vars(other))\n", F),
    "a package handed on": case("import p\n\n\ndef run(name):\n    return getattr(p, name)\n", F),
    "a module named by a string": case(
        "import importlib\n\n\ndef run():\n    return importlib.import_module('p.other').f()\n", F
    ),
    "a function named by a string": case("def run(load):\n    return load('p.other:f')\n", F),
    "the beginning of a module's name": {
        "a": "import importlib\n\n\ndef run(x):\n    return importlib.import_module(f'p.inner.{x}')\n",
        "inner/__init__": "",
        "inner/other": F,
    },
    "names imported on demand": case(
        "import p\n\n\ndef run():\n    return p.f()\n",
        F,
        __init__="WHERE = {'f': 'p.other'}\n\n\ndef __getattr__(name):\n    import importlib\n\n"
        "    return getattr(importlib.import_module(WHERE[name]), name)\n",
    ),
    "globals": case(f"def run(name):\n    return globals()[name]()\n\n\n{F}"),
    "eval": case(f"def run():\n    return eval('f()')\n\n\n{F}"),
    "classes found by their base": case(
        "from p import other\nfrom p.base import Base\n\n\ndef run():\n    return Base.__subclasses__()\n",
        "from p.base import Base\n\n\nclass Derived(Base):\n    def f(self):\n        return 1\n",
        base="class Base:\n    pass\n",
    ),
    "classes that enter themselves": case(
        USES_TABLE,
        "from p.registry import Base\n\n\nclass f(Base):\n    def f(self):\n        return 1\n",
        registry=f"{TABLE}class Base:\n    def __init_subclass__(cls):\n        TABLE[cls.__name__] = cls\n",
    ),
    "classes entered by a metaclass": case(
        USES_TABLE,
        "from p.registry import Meta\n\n\nclass f(metaclass=Meta):\n    x = 1 and 'return 1'\n",
        registry=f"{TABLE}class Meta(type):\n    def __init__(cls, *a):\n        TABLE['f'] = cls\n",
    ),
    "objects entered by their constructor": case(
        USES_TABLE,
        f"from p.registry import Entry\n\n\n{F}\n\nENTRY = Entry(f)\n",
        registry=f"{TABLE}class Base:\n    def __init__(self, f):\n        TABLE['f'] = f\n\n\n"
        "class Entry(Base):\n    pass\n",
    ),
    "a value entered by a function": case(USES_TABLE, f"{IMPORTS_ENTER}{F}\n\nentered = enter(f)\n", registry=ENTER),
    "a value entered by a method": case(
        USES_TABLE, f"{IMPORTS_TABLE}before = TABLE.setdefault('f', f)\n", registry=ENTER
    ),
    "a call of what a call returns": case(
        USES_TABLE, f"{IMPORTS_TABLE}before = TABLE['all'].setdefault('f', f)\n", registry=ENTER
    ),
    "entries made in a loop": case(
        USES_TABLE, f"{IMPORTS_TABLE}for name in 'f':\n    TABLE[name] = f\n", registry=ENTER
    ),
    "an imported list that is added to": case(
        "from p import other\nfrom p.registry import LIST\n\n\ndef run():\n    return LIST\n",
        f"from p.registry import LIST\n\n\n{F}\n\nLIST += [f]\n",
        registry="LIST = []\n",
    ),
    "a decorator in a class": case(
        USES_TABLE, f"{IMPORTS_ENTER}class C:\n    @enter\n    def f(self):\n        return 1\n", registry=ENTER
    ),
    "a call in a class body": case(
        USES_TABLE, f"{IMPORTS_ENTER}class C:\n    def f(self):\n        return 1\n\n    enter(f)\n", registry=ENTER
    ),
    "a library's register": case(
        "from p import other\n\n\ndef run(copyreg):\n    return copyreg\n", f"import atexit\n\n\n@atexit.register\n{F}"
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
    "a name in a walrus": case("from p.other import f\n\n\ndef run():\n    return f\n", "g = (f := 'return 1') + ''\n"),
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
