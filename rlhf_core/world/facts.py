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

_STORIES = """
tom ball red big garden       anna ball gray tiny school    ben hat blue small kitchen    mia hat green huge tower
anna cup white tiny market    tom cup black big kitchen     mia box brown huge forest     ben box pink small school
ben bike green big tower      anna bike red huge forest     tom ring gray tiny market     mia ring white small garden
"""


@dataclass(frozen=True)
class Thing:
    """Something with one true value per attribute; ``owner`` is set when a story in the prompt tells the values."""

    name: str
    color: str
    size: str
    place: str
    owner: str = ""

    def value(self, attribute: str) -> str:
        """The true value of ``color``, ``size`` or ``place``."""
        return {"color": self.color, "size": self.size, "place": self.place}[attribute]

    def story(self) -> str:
        """The sentence that tells everything about a story's thing."""
        return f"{self.owner} has a {self.size} {self.color} {self.name} in the {self.place}."


def things() -> tuple[Thing, ...]:
    """The things whose facts a model has to know by heart."""
    words = _THINGS.split()
    return tuple(Thing(*words[i : i + 4]) for i in range(0, len(words), 4))


def story_things() -> tuple[Thing, ...]:
    """The things of the stories; their facts stand in the prompt."""
    words = _STORIES.split()
    rows = [words[i : i + 5] for i in range(0, len(words), 5)]
    return tuple(Thing(name, color, size, place, owner) for owner, name, color, size, place in rows)


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
