"""What is true in the world: things with a colour, a size and a place, and stories that state such facts."""

from __future__ import annotations

from dataclasses import dataclass

VALUES: dict[str, tuple[str, ...]] = {
    "color": ("red", "blue", "green", "white", "black", "brown", "pink", "gray"),
    "size": ("tiny", "small", "big", "huge"),
    "place": ("kitchen", "garden", "school", "market", "forest", "tower"),
}

ATTRIBUTES: tuple[str, ...] = tuple(VALUES)

_THINGS = """
lamp red small kitchen    boat blue huge market     drum brown big school      coat gray big tower
rose pink tiny garden     frog green tiny forest    cake white small market    bell black huge tower
desk brown huge school    tent green big forest     fish blue small kitchen    coin red tiny garden
"""

_OWNERS = ("tom", "anna", "ben", "mia")
_OWNED = ("ball", "hat", "cup", "box", "bike", "ring")
_STORIES_PER_FACT = 2


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
    """A fact that holds only because the prompt says so; another story may say otherwise of the same thing."""

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
    words = _THINGS.split()
    return tuple(Thing(*words[i : i + 4]) for i in range(0, len(words), 4))


def stories() -> tuple[Story, ...]:
    """Two stories per thing and attribute; their values spread over all there are, so nothing can be had by heart."""
    return tuple(
        Story(_OWNERS[(place + turn) % len(_OWNERS)], name, attribute, values[(2 * place + 3 * turn) % len(values)])
        for place, name in enumerate(_OWNED)
        for attribute, values in VALUES.items()
        for turn in range(_STORIES_PER_FACT)
    )


def subjects() -> tuple[str, ...]:
    """The names of everything a fact can be about."""
    return (*(thing.name for thing in things()), *_OWNED)


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
