"""A small package: one of its stages uses something of each kind, beside each of which stands
something unused.
"""

from __future__ import annotations

FILES = {
    "house/__init__.py": '"""House."""\n',
    "house/stages/__init__.py": "",
    "house/stages/a.py": '''
from __future__ import annotations

import functools
import math

import house.lib.deep.far
from house import report
from house.lib import one, plain
from house.lib import two as second
from house.lib.deep import exported as renamed
from house.lib.models import Settings, Shape
from house.lib.shadow import hidden
from house.lib.tables import lookup
from house.progress import track
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from house.lib.types import OnlyTyped

LIMIT = 3
UNUSED = 4


def run(config: Settings, seen: OnlyTyped | None = None) -> float:
    """Doc."""
    from house.lib.late import imported_inside

    def nested(x):
        return one.used(x) + LIMIT

    track("working")
    hidden = second.used(1)
    total = nested(1) + renamed() + imported_inside() + house.lib.deep.far.far_away(hidden)
    return total + lookup("square")(2) + Shape(2).area + math.pi + report.text()


def unused():
    return one.unused()


if __name__ == "__main__":
    unused()
''',
    "house/lib/__init__.py": "",
    "house/lib/one.py": '''
import functools

from house.lib import helpers
from house.lib.helpers import DEFAULT, decorate

SCALE = 2.0
OTHER = 3.0


@functools.lru_cache(maxsize=4)
@decorate
def used(x, factor=DEFAULT):
    """Doc."""
    # comment
    return x * factor * SCALE + helpers.shift(x)


def unused(x):
    return x - OTHER
''',
    "house/lib/two.py": "def used(x):\n    return x\n\n\ndef unused(x):\n    return x + 1\n",
    "house/lib/helpers.py": '''
DEFAULT = 5
NOT_DEFAULT = 6


def decorate(f):
    return lambda *a, **k: bottom(f(*a, **k))


def bottom(x):
    return x + 0


def shift(x):
    return x + 1


def not_shift(x):
    return x - 1
''',
    "house/lib/plain.py": "def never():\n    return 1\n",
    "house/lib/shadow.py": "def hidden():\n    return 1\n\n\ndef other():\n    return 2\n",
    "house/lib/types.py": "class OnlyTyped:\n    size = 1\n\n\nclass NotEvenTyped:\n    size = 2\n",
    "house/lib/late.py": '''
from house.lib.helpers import shift

RATE = 1


def imported_inside():
    return shift(RATE)


def not_imported():
    return 2
''',
    "house/lib/deep/__init__.py": "from house.lib.deep.origin import original as exported\n",
    "house/lib/deep/origin.py": "def original():\n    return 1\n\n\ndef another():\n    return 2\n",
    "house/lib/deep/far.py": "def far_away(x):\n    return x + 7\n\n\ndef farther(x):\n    return x + 8\n",
    "house/lib/models.py": '''
from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel, model_validator

from house.lib import bounds


class Inner(BaseModel):
    depth: int = 1


class Other(BaseModel):
    width: int = 2


class Settings(BaseModel):
    size: int = bounds.SMALLEST
    inner: Inner = Inner()
    other: Other | None = None

    @model_validator(mode="after")
    def _sound(self) -> Settings:
        if self.size > bounds.LARGEST:
            raise ValueError("size")
        return self


class Base:
    edges = 4

    def area_of(self, side: float) -> float:
        return side * side


@dataclass
class Shape(Base):
    side: float
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.side = max(self.side, 0)

    @property
    def area(self) -> float:
        return self.area_of(self.side)


class Unused(Base):
    edges = 5
''',
    "house/lib/bounds.py": "SMALLEST = 1\nLARGEST = 10\nMIDDLE = 5\n",
    "house/lib/tables.py": '''
from house.lib import entries
from house.lib.registry import TABLE


def lookup(name):
    return TABLE[name]


def forget(name):
    del TABLE[name]
''',
    "house/lib/registry.py": '''
TABLE = {}


def register(name):
    def enter(f):
        TABLE[name] = f
        return f

    return enter
''',
    "house/lib/entries.py": '''
from house.lib.registry import TABLE, register


def square(x):
    return power(x, 2)


register("square")(square)


def power(x, n):
    return x**n


TABLE["cube"] = lambda x: power(x, 3)


def unentered(x):
    return x
''',
    "house/report/__init__.py": "FOLDER = 1\n\n\ndef text():\n    return FOLDER\n",
    "house/report/page.j2": "<p>{{ text }}</p>\n",
    "house/report/unused.py": "def unused():\n    return 1\n",
    "house/progress.py": "def track(x):\n    return spell(x)\n\n\ndef spell(x):\n    return x\n",
    "house/elsewhere.py": "import house.lib.one\n\nhouse.lib.one.SCALE = 9\n",
}  # fmt: skip
