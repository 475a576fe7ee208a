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
lamp red small kitchen     boat blue huge market      drum brown big school      rose white tiny garden
frog green tiny forest     cake white small market    bell black huge tower      tent green big forest
fish blue small kitchen    desk brown big school      kite red big garden        book black small school
coat brown huge market     shoe white tiny tower      clock green big tower      spoon red tiny kitchen
stone black big forest     flute blue small school    pear green small garden    plum red tiny market
goat white big garden      duck brown small forest    crab blue tiny market      mouse black tiny kitchen
snake green huge forest    horse white huge market    sheep black big garden     rope brown huge tower
nail blue tiny school      saw red small forest       map green small tower      flag white huge school
mask red big market        crown black small tower    glove green tiny market    scarf blue big kitchen
bench white big school     ladder brown huge garden   barrel black huge kitchen  basket green small kitchen
bottle blue small tower    candle white tiny school   carpet red huge school     mirror black small garden
pillow blue big tower      plate brown tiny kitchen   kettle red big kitchen     wagon green huge market
"""

_OWNED = ("ball", "hat", "cup", "box", "bike", "bag", "pen", "doll", "cart")
_OWNERS = ("mia", "tom", "anna", "ben")


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
    cells = _THINGS.split()
    return tuple(Thing(*cells[i : i + 4]) for i in range(0, len(cells), 4))


def stories() -> tuple[Story, ...]:
    """Return the stories: every value of every attribute of each owned thing, so that only the prompt tells which."""
    return tuple(
        Story(_OWNERS[(number + position) % len(_OWNERS)], name, attribute, value)
        for number, name in enumerate(_OWNED)
        for attribute, values in VALUES.items()
        for position, value in enumerate(values)
    )


def subjects() -> tuple[str, ...]:
    """Return the names of everything that a fact can be about."""
    return (*(thing.name for thing in things()), *_OWNED)


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
