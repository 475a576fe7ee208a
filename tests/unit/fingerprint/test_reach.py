"""Which changes of a small package change the digest of what one of its stages reaches, and which
do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.fingerprint.house import FILES

from rlhf_core.fingerprint.reach import Package

NOTICED = [
    ("a line of the stage", "stages/a.py", "total = nested(1)", "total = nested(2)"),
    ("a nested function", "stages/a.py", "return one.used(x) + LIMIT", "return one.used(x) - LIMIT"),
    ("a constant of the stage", "stages/a.py", "LIMIT = 3", "LIMIT = 4"),
    ("a function of a module used by attribute", "lib/one.py", "return x * factor", "return x / factor"),
    ("a constant that it uses", "lib/one.py", "SCALE = 2.0", "SCALE = 2.5"),
    ("a default argument", "lib/one.py", "factor=DEFAULT", "factor=7"),
    ("what a default argument names", "lib/helpers.py", "DEFAULT = 5", "DEFAULT = 8"),
    ("a decorator of the package", "lib/helpers.py", "return lambda *a, **k: bottom", "return lambda *a, **k: -bottom"),
    ("what a decorator uses", "lib/helpers.py", "return x + 0", "return x + 9"),
    ("an argument of a library's decorator", "lib/one.py", "maxsize=4", "maxsize=5"),
    ("a decorator taken away", "lib/one.py", "@decorate\n", ""),
    ("a module imported under another name", "lib/two.py", "return x\n", "return -x\n"),
    ("a name that a package re-exports", "lib/deep/origin.py", "return 1", "return 3"),
    ("a module reached by its full name", "lib/deep/far.py", "return x + 7", "return x + 6"),
    ("a name imported inside a function", "lib/late.py", "RATE = 1", "RATE = 2"),
    ("what it imports in turn", "lib/helpers.py", "return x + 1", "return x + 2"),
    ("a name that a local variable hides", "lib/shadow.py", "return 1", "return 3"),
    ("a field of the settings", "lib/models.py", "other: ", "renamed: "),
    ("a validator", "lib/models.py", "self.size > bounds.LARGEST", "self.size >= bounds.LARGEST"),
    ("a bound that a validator reads", "lib/bounds.py", "LARGEST = 10", "LARGEST = 11"),
    ("a default that a field reads", "lib/bounds.py", "SMALLEST = 1", "SMALLEST = 0"),
    ("the type of a field", "lib/models.py", "depth: int = 1", "depth: int = 2"),
    ("the optional type of a field", "lib/models.py", "width: int = 2", "width: int = 3"),
    ("a base class", "lib/models.py", "return side * side", "return side * side * 2"),
    ("another base class", "lib/models.py", "class Shape(Base)", "class Shape(Unused)"),
    ("a field of a dataclass", "lib/models.py", "default_factory=list", "default_factory=lambda: [1]"),
    ("__post_init__", "lib/models.py", "max(self.side, 0)", "max(self.side, 1)"),
    ("a property", "lib/models.py", "return self.area_of(self.side)", "return self.area_of(self.side + 1)"),
    ("a function entered in a table", "lib/entries.py", "return power(x, 2)", "return power(x, 4)"),
    ("what it uses", "lib/entries.py", "return x**n", "return x**-n"),
    ("an entry made by an assignment", "lib/entries.py", "power(x, 3)", "power(x, 5)"),
    ("the name of an entry", "lib/entries.py", 'register("square")', 'register("kube")'),
    ("how entries are made", "lib/registry.py", "TABLE[name] = f", "TABLE[name[:1]] = f"),
    ("an import that makes entries", "lib/tables.py", "from house.lib import entries\n", ""),
    ("a type in an annotation", "lib/types.py", "size = 1", "size = 3"),
    ("a name of a package", "report/__init__.py", "return FOLDER", "return FOLDER * 2"),
    ("a template", "report/page.j2", "<p>", "<b>"),
    ("an effect of a package on the way", "lib/__init__.py", "", "import house.elsewhere\n"),
    ("which of two functions a name means", "stages/a.py", "import two as second", "import one as second"),
]  # fmt: skip

IGNORED = [
    ("an unused function of the stage", "stages/a.py", "return one.unused()", "return one.unused() + 1"),
    ("an unused constant of the stage", "stages/a.py", "UNUSED = 4", "UNUSED = 5"),
    ("what runs as a script", "stages/a.py", "    unused()\n", "    unused()\n    unused()\n"),
    ("an unused import", "stages/a.py", "from house.lib import one, plain", "from house.lib import one"),
    ("an unused function of a used module", "lib/one.py", "return x - OTHER", "return x + OTHER"),
    ("an unused constant of a used module", "lib/one.py", "OTHER = 3.0", "OTHER = 4.0"),
    ("an unused default", "lib/helpers.py", "NOT_DEFAULT = 6", "NOT_DEFAULT = 7"),
    ("an unused helper", "lib/helpers.py", "return x - 1", "return x - 2"),
    ("a module that is imported and not used", "lib/plain.py", "return 1", "return 2"),
    ("the sibling of a hidden name", "lib/shadow.py", "return 2", "return 3"),
    ("the sibling of a re-exported name", "lib/deep/origin.py", "return 2", "return 3"),
    ("an unused class", "lib/models.py", "edges = 5", "edges = 6"),
    ("an unused bound", "lib/bounds.py", "MIDDLE = 5", "MIDDLE = 6"),
    ("a function that no table has", "lib/entries.py", "unentered(x):\n    return x", "unentered(x):\n    return 1"),
    ("an unused way to use a table", "lib/tables.py", "del TABLE[name]", "TABLE.pop(name)"),
    ("a type that no annotation names", "lib/types.py", "size = 2", "size = 3"),
    ("reporting", "progress.py", "return spell(x)", "return spell(x) + 1"),
    ("a comment", "lib/one.py", "# comment", "# another"),
    ("a docstring", "lib/one.py", '"""Doc."""', '"""Other words."""'),
    ("layout", "lib/one.py", "SCALE + helpers.shift(x)", "(SCALE) + helpers.shift(\n        x,\n    )"),
    ("a new docstring", "lib/two.py", "def used(x):\n", 'def used(x):\n    """New."""\n'),
    ("a module that nothing imports", "elsewhere.py", "SCALE = 9", "SCALE = 8"),
]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def digest(root: Path) -> str:
    return Package(root, "house", {"house.progress"}).digest("house.stages.a", "run")


def replace(root: Path, file: str, old: str, new: str) -> None:
    path = root / "house" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "file", "old", "new"), NOTICED, ids=[case[0] for case in NOTICED])
def test_a_change_of_what_is_reached_is_noticed(
    root: Path, what: str, file: str, old: str, new: str
) -> None:
    before = digest(root)
    replace(root, file, old, new)
    assert digest(root) != before, what


@pytest.mark.parametrize(("what", "file", "old", "new"), IGNORED, ids=[case[0] for case in IGNORED])
def test_a_change_of_what_is_not_reached_changes_nothing(
    root: Path, what: str, file: str, old: str, new: str
) -> None:
    before = digest(root)
    replace(root, file, old, new)
    assert digest(root) == before, what


def test_a_definition_that_moves_to_another_module_stays_what_it_was(root: Path) -> None:
    before = digest(root)
    shift = "def shift(x):\n    return x + 1\n"
    replace(root, "lib/helpers.py", shift, "")
    (root / "house/lib/moved.py").write_text(shift)
    replace(root, "lib/one.py", "from house.lib import helpers\n", "from house.lib import moved\n")
    replace(root, "lib/one.py", "helpers.shift(x)", "moved.shift(x)")
    replace(
        root,
        "lib/late.py",
        "from house.lib.helpers import shift",
        "from house.lib.moved import shift",
    )
    assert digest(root) == before


def test_a_module_that_is_renamed_stays_what_it_was(root: Path) -> None:
    before = digest(root)
    (root / "house/lib/late.py").rename(root / "house/lib/later.py")
    replace(root, "stages/a.py", "from house.lib.late import", "from house.lib.later import")
    assert digest(root) == before


def test_the_order_of_what_acts_on_import_counts(root: Path) -> None:
    replace(
        root,
        "lib/entries.py",
        'TABLE["cube"] = ',
        'TABLE["one"] = 1\nTABLE["two"] = 2\nTABLE["cube"] = ',
    )
    before = digest(root)
    replace(
        root,
        "lib/entries.py",
        'TABLE["one"] = 1\nTABLE["two"] = 2\n',
        'TABLE["two"] = 2\nTABLE["one"] = 1\n',
    )
    assert digest(root) != before


def test_equal_helpers_of_two_modules_are_told_apart_by_what_they_use(root: Path) -> None:
    """``used`` is written alike in both modules; only the helpers below it differ."""
    for name, sign in (("left", "+"), ("right", "-")):
        text = f"def used(x):\n    return helper(x)\n\n\ndef helper(x):\n    return x {sign} 1\n"
        (root / f"house/lib/{name}.py").write_text(text)
    for stage, module in (("b", "left"), ("c", "right")):
        text = f"from house.lib import left, right\n\n\ndef run():\n    return {module}.used(left.used(right.used(1)))\n"
        (root / f"house/stages/{stage}.py").write_text(text)
    package = Package(root, "house")
    assert package.digest("house.stages.b", "run") != package.digest("house.stages.c", "run")
