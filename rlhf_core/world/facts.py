"""The facts of the world: things with a colour, a size and a place, and stories that state such facts."""

from __future__ import annotations

from dataclasses import dataclass

VALUES: dict[str, tuple[str, ...]] = {
    "color": ("red", "blue", "green", "white", "black", "brown"),
    "size": ("tiny", "small", "big", "huge"),
    "place": ("kitchen", "garden", "school", "market", "forest", "tower"),
}

ATTRIBUTES: tuple[str, ...] = tuple(VALUES)

_THINGS = """
lamp red small kitchen    boat blue huge market     drum brown big school    rose white tiny garden
frog green tiny forest    cake white small market   bell black huge tower    tent green big forest
fish blue small kitchen   desk brown big school
"""

_OWNERS = ("tom", "anna", "ben", "mia")
_OWNERS_PER_FACT = 2

_OWNED = """
ball red tiny garden    hat black small tower    cup white big kitchen    box brown huge market    bike blue huge forest
"""


@dataclass(frozen=True)
class Thing:
    """A thing with one true value per attribute, the same in every conversation."""

    name: str
    color: str
    size: str
    place: str

    def value(self, attribute: str) -> str:
        """Return the true value of ``color``, ``size`` or ``place``."""
        return {"color": self.color, "size": self.size, "place": self.place}[attribute]


@dataclass(frozen=True)
class Story:
    """A fact that a prompt states before its question."""

    owner: str
    name: str
    attribute: str
    value: str

    def sentence(self) -> str:
        """Return the sentence that states the fact."""
        if self.attribute == "place":
            return f"{self.owner} has a {self.name} in the {self.value}."
        return f"{self.owner} has a {self.value} {self.name}."


def things() -> tuple[Thing, ...]:
    """Return the things whose facts a model has to memorise."""
    return _table(_THINGS)


def owned_things() -> tuple[Thing, ...]:
    """Return the things of the stories, which never contradict each other."""
    return _table(_OWNED)


def _table(rows: str) -> tuple[Thing, ...]:
    cells = rows.split()
    return tuple(Thing(*cells[i : i + 4]) for i in range(0, len(cells), 4))


def stories() -> tuple[Story, ...]:
    """Return every fact about an owned thing, as the stories of two owners."""
    return tuple(
        Story(_OWNERS[(number + turn) % len(_OWNERS)], thing.name, attribute, thing.value(attribute))
        for number, thing in enumerate(owned_things())
        for attribute in ATTRIBUTES
        for turn in range(_OWNERS_PER_FACT)
    )


def subjects() -> tuple[str, ...]:
    """Return the names of everything that a fact can be about."""
    return tuple(thing.name for thing in (*things(), *owned_things()))


def attribute_of(value: str) -> str:
    """Return the attribute that a value belongs to (no value belongs to two)."""
    return next(attribute for attribute, values in VALUES.items() if value in values)


def statements(subject: str, attribute: str, value: str) -> tuple[str, str, str]:
    """Return the three ways to state a fact about ``subject``: by name, by pronoun, and in full."""
    preposition = "in the " if attribute == "place" else ""
    article = "the " if attribute == "place" else ""
    return (
        f"the {subject} is {preposition}{value}.",
        f"it is {preposition}{value}.",
        f"the {attribute} of the {subject} is {article}{value}.",
    )
