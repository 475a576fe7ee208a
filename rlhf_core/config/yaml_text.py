"""YAML as users write it: read with limits, changed with its comments kept."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, first_line

# A params.yaml with all its comments has 10,000 characters, 600 values, and brackets within
# brackets within brackets.
MOST_CHARACTERS, MOST_VALUES, MOST_BRACKETS = 200_000, 20_000, 100


class NotYaml(ConfigError):
    """A text is no YAML at all."""


def _yaml() -> Any:
    """Return a reader and writer in DVC's style, so that ``dvc exp run -S`` changes no other line."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.default_flow_style = False
    return yaml


CONFLICT = re.compile(r"^(?:<{7}|>{7})(?: |$)", re.MULTILINE)
SETTLE = "choose for each what is to stand, and delete the lines <<<<<<<, ======= and >>>>>>>"
SETTLE_LOCK = (
    "settle params.yaml first, then take one side whole (`git checkout --ours dvc.lock`, or --theirs) and `rlhf run`: "
    "what either side has computed comes from DVC's cache"
)


def require_merged(text: str, name: str) -> None:
    """Refuse a file of a merge or stash that git could not finish.

    Raises:
        ConfigError: names the first of git's marks, and what to do.
    """
    if mark := CONFLICT.search(text):
        line = text.count("\n", 0, mark.start()) + 1
        remedy = SETTLE_LOCK if Path(name).name == "dvc.lock" else SETTLE
        raise ConfigError(f"{name} has conflicts of a merge, the first in line {line}; {remedy}")


def parse(text: str, name: str) -> Any:
    """Return the round-trip document of ``text``.

    Raises:
        ConfigError: It is no YAML mapping (with line and column), or larger than a file of settings
            ever is.
    """
    require_merged(text, name)
    document = _load(text, name)
    if document is None:
        document = _yaml().load("{}")
    if not isinstance(document, dict):
        raise ConfigError(f"{name} must be a mapping of sections, not a {type(document).__name__}")
    return document


def parse_scalar(text: str) -> Any:
    """Return the value of ``text`` as YAML; the text itself if it has none."""
    try:
        return _load(text, "the value")
    except NotYaml:
        return text


def _load(text: str, name: str) -> Any:
    from ruamel.yaml.error import YAMLError

    if len(text) > MOST_CHARACTERS:
        raise ConfigError(
            f"{name} has {len(text)} characters, more than the {MOST_CHARACTERS} that are read"
        )
    if _open_brackets(text) > MOST_BRACKETS:
        raise ConfigError(f"{name} is nested too deeply for a file of settings")
    try:
        document = _yaml().load(text)
        _require_bounded(document, name)
    except (YAMLError, ValueError) as error:  # an impossible date or number
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        position = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "context", None)
        problem = problem or first_line(error)
        raise NotYaml(f"{name} is not valid YAML:{position} {problem}") from error
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply for a file of settings") from None
    return document


def _open_brackets(text: str) -> int:
    """Return how many brackets are open at most; the reader's time grows with their square."""
    depth = most = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        if bracket in "[{":
            depth += 1
        elif depth:
            depth -= 1
        most = max(most, depth)
    return most


def _require_bounded(document: Any, name: str) -> None:
    """Refuse aliases that repeat so much, or themselves, that no copy without them fits."""
    sizes: dict[int, int] = {}  # 0: being counted, so whoever meets it again is inside of it

    def size(value: Any) -> int:
        if not isinstance(value, dict | list | tuple):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = 0
            items = value.values() if isinstance(value, dict) else value
            sizes[id(value)] = 1 + sum(size(item) for item in items)
        if not 0 < sizes[id(value)] <= MOST_VALUES:
            raise ConfigError(
                f"{name} has aliases of its own parts that make it endless, or more than {MOST_VALUES} values"
            )
        return sizes[id(value)]

    size(document)


def take_over(section: Any, key: str, other: Any) -> None:
    """Give a section a value of another one, with the comment that it has there, if any.

    Blank lines that set the section off from the next stay below its last value.
    """
    holder, last = _last_value(section)
    if key in section:
        holder, last = (
            _last_value({key: section[key]}) if isinstance(section[key], dict) else (section, key)
        )
    below = _comment(holder, last).partition("\n")[2]
    if below:
        _cut_below(holder, last)
    section.ca.items.pop(key, None)
    is_new = key not in section
    section[key] = other[key]
    text = _comment(other, key).partition("\n")[0]
    if text:
        section.yaml_add_eol_comment(text.removeprefix("# "), key, column=0)
    if below:
        _add_below(*(_last_value(section) if is_new else (section, key)), below)


def _comment(section: Any, key: str) -> str:
    """Return what follows a value up to the next one: its comment, and blank lines."""
    tokens = section.ca.items.get(key) if hasattr(section, "ca") else None
    return str(tokens[2].value) if tokens and tokens[2] else ""


def _cut_below(section: Any, key: str) -> None:
    """Take away the lines after a value and its comment."""
    token = section.ca.items[key][2]
    token.value = token.value.partition("\n")[0] + "\n"
    if token.value == "\n":
        del section.ca.items[key]


def _add_below(section: Any, key: str, text: str) -> None:
    """Add lines after a value and its comment."""
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    tokens = section.ca.items.setdefault(key, [None, None, None, None])
    if tokens[2] is None:
        tokens[2] = CommentToken("\n", CommentMark(0), None)
    elif not tokens[2].value.endswith("\n"):
        tokens[2].value += "\n"
    tokens[2].value += text


def _last_value(section: Any) -> tuple[Any, str]:
    """Return the innermost section that a section ends with, and its last key; empty where there is
    none.
    """
    last = next(reversed(section), "")
    while last and isinstance(section[last], dict) and section[last]:
        section = section[last]
        last = next(reversed(section))
    return section, last


def dump(document: Any) -> str:
    """Return a round-trip document as text, with all comments but those within lists.

    DVC drops the latter too.
    """
    stream = io.StringIO()
    _yaml().dump(_in_block_style(document), stream)
    return stream.getvalue()


def _in_block_style(document: Any) -> Any:
    """Return a copy that is written with an item of a mapping or list per line."""
    document = copy.deepcopy(document)
    sections = [document]
    while sections:
        section = sections.pop()
        for key, value in section.items():
            if isinstance(value, list) and value:
                section[key] = plain(value)
            elif isinstance(value, dict) and value:
                if hasattr(value, "fa"):  # a mapping that was read from YAML text
                    value.fa.set_block_style()
                sections.append(value)
    return document


def read(path: Path) -> Any:
    """Return the document in ``path``; ``ConfigError`` when it cannot be read."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist; make a workspace with `rlhf init DIR`"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}") from error


def plain(value: Any) -> Any:
    """Return a copy of a round-trip document made of plain dicts, lists and scalars."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if kind is bool else kind(value)
    return value
