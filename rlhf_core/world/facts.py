"""What is true in the world: things with a colour, a size and a place, and stories that state such facts."""

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
    """Something with one true value per attribute, the same in every conversation."""

    name: str
    color: str
    size: str
    place: str

    def value(self, attribute: str) -> str:
        """The true value of ``color``, ``size`` or ``place``."""
        return {"color": self.color, "size": self.size, "place": self.place}[attribute]


@dataclass(frozen=True)
class Story:
    """A fact that the prompt tells before it asks."""

    owner: str
    name: str
    attribute: str
    value: str

    def sentence(self) -> str:
        """The sentence that tells the fact."""
        if self.attribute == "place":
            return f"{self.owner} has a {self.name} in the {self.value}."
        return f"{self.owner} has a {self.value} {self.name}."


def things() -> tuple[Thing, ...]:
    """The things whose facts a model has to know by heart."""
    return _table(_THINGS)


def owned_things() -> tuple[Thing, ...]:
    """The things of the stories. Stories never contradict each other: reading helps, and remembering does no harm."""
    return _table(_OWNED)


def _table(rows: str) -> tuple[Thing, ...]:
    words = rows.split()
    return tuple(Thing(*words[i : i + 4]) for i in range(0, len(words), 4))


def stories() -> tuple[Story, ...]:
    """Every fact about an owned thing, told of two owners."""
    return tuple(
        Story(_OWNERS[(place + turn) % len(_OWNERS)], thing.name, attribute, thing.value(attribute))
        for place, thing in enumerate(owned_things())
        for attribute in ATTRIBUTES
        for turn in range(_OWNERS_PER_FACT)
    )


def subjects() -> tuple[str, ...]:
    """The names of everything a fact can be about."""
    return tuple(thing.name for thing in (*things(), *owned_things()))


def attribute_of(value: str) -> str:
    """Which attribute a value belongs to (no value belongs to two)."""
    return next(attribute for attribute, values in VALUES.items() if value in values)


def statements(subject: str, attribute: str, value: str) -> tuple[str, str, str]:
    """The three ways to state a fact about ``subject``: by name, by pronoun, and in full."""
    place = "in the " if attribute == "place" else ""
    article = "the " if attribute == "place" else ""
    return (
        f"the {subject} is {place}{value}.",
        f"it is {place}{value}.",
        f"the {attribute} of the {subject} is {article}{value}.",
    )
