"""Wrong parameters in one line each: the path, what is wrong, and the nearest valid name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rlhf_core.config.model import OfKind, kind_of

SECRET = "secret"  # the kind of an error whose value must not be shown again
MOST_LINES, LONGEST_LINE = 20, 1000
SHOWN_CHARACTERS = 120  # of a wrong value
# What pydantic says of these in Python's words.
IN_WORDS_OF_YAML = {
    "tuple_type": "input should be a list, such as [a, b]",
    "model_type": "input should be a mapping of settings, such as {a: 1}",
    "dict_type": "input should be a mapping, such as {a: 1}",
}
MOST_DEEPER = 3  # a name that occurs in more places, such as seed, tells nothing


def nearest(name: str, valid: Iterable[str], section: str = "") -> str:
    """Return ``did you mean 'x'?`` for a close match, else the list of valid names.

    Args:
        section: The section of settings that has the names, so that a match is told as it is typed.
    """
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{_joined(section, close[0])}'?"
    return f"known names: {', '.join(names)}"


def describe(source: str, error: ValidationError, model: type[BaseModel], prefix: str) -> str:
    """Describe what is wrong with a file: one problem on the same line, several on a line each.

    Args:
        source: Name of the file that was read.
        prefix: Name of the section of params.yaml that ``model`` is, or "" for a whole file.
    """
    problems = error.errors()
    shown = [_line(problem, model, prefix) for problem in problems[:MOST_LINES]]
    shown = [shortened(line, LONGEST_LINE) for line in shown]
    if len(shown) == 1:
        return f"{source}: {shown[0]}"
    lines = [f"{source}: {len(problems)} problems"]
    lines += [f"  {line}" for line in shown]
    if len(problems) > MOST_LINES:
        lines.append(f"  … and {len(problems) - MOST_LINES} more")
    return "\n".join(lines)


def shortened(text: str, most: int) -> str:
    """Return ``text`` with its middle left out where it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} … {text[-most // 3 :]}"


def _line(problem: Any, model: type[BaseModel], prefix: str) -> str:
    kind = problem["type"]
    message = IN_WORDS_OF_YAML.get(kind, problem["msg"].removeprefix("Value error, "))
    parts = [str(part) for part in problem["loc"]]
    location, owner = _locate(model, parts, at_owner=kind == "extra_forbidden")
    path = _joined(prefix, *location)
    if not path:
        return str(message)
    if kind == "extra_forbidden":
        section = _joined(prefix, *location[:-1])
        deeper = list(_deeper(owner, location[-1])) if owner else []
        if 0 < len(deeper) <= MOST_DEEPER:
            quoted = " or ".join(f"'{_joined(section, name)}'" for name in deeper)
            return f"unknown parameter '{path}'; did you mean {quoted}?"
        return f"unknown parameter '{path}'; {nearest(location[-1], _names(owner), section)}"
    if kind == "missing":
        return f"parameter '{path}' is missing; add it"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        context = problem["ctx"]
        discriminator = f"{path}.{_quoted(context['discriminator'])[0]}"
        if kind == "union_tag_not_found":
            return f"parameter '{discriminator}' is missing; add it"
        tag, tags = context["tag"], _quoted(context["expected_tags"])
        return f"parameter '{discriminator}': there is no '{tag}'; {nearest(tag, tags)}"
    given = problem.get("input")
    hidden = kind == SECRET or isinstance(given, dict | BaseModel) or _holds_models(given)
    suffix = "" if hidden else f" (got {shortened(repr(given), SHOWN_CHARACTERS)})"
    return f"parameter '{path}': {message[0].lower()}{message[1:]}{suffix}"


def _joined(*parts: str) -> str:
    """Return the dotted path of its parts, of which some may be empty."""
    return ".".join(part for part in parts if part)


def _quoted(text: str) -> list[str]:
    """Return the names in a list such as ``'a', 'b'``."""
    return re.findall(r"'([^']*)'", text)


def _holds_models(given: Any) -> bool:
    if not isinstance(given, list | tuple):
        return False
    return any(isinstance(item, dict | BaseModel) for item in given)


def _names(model: type[BaseModel] | None) -> list[str]:
    """Return the keys that params.yaml may have for ``model``."""
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _deeper(model: type[BaseModel], name: str) -> Iterator[str]:
    """Yield the paths within ``model`` that end in ``name``: ``optimizer.lr`` for ``lr``."""
    for field_name, field in model.model_fields.items():
        if get_origin(field.annotation) in (dict, list, tuple):
            continue
        key = field.alias or field_name
        for section in _models(field.annotation):
            if name in _names(section):
                yield f"{key}.{name}"
            yield from (f"{key}.{path}" for path in _deeper(section, name))


def _locate(
    model: type[BaseModel], location: Sequence[str], *, at_owner: bool
) -> tuple[list[str], type[BaseModel] | None]:
    """Return ``location`` as params.yaml spells it, and the model there.

    With ``at_owner`` it is the model that holds what is there. Inside a list of several kinds of
    model pydantic's location also names the kind, which params.yaml does not.
    """
    candidates: list[type[BaseModel]] = [model]
    path: list[str] = []
    is_key = False  # whether the next part is a key of a mapping's own, which no model declares
    for position, part in enumerate(location):
        if at_owner and position == len(location) - 1:
            return [*path, part], candidates[0] if candidates else None
        tagged = [choice for choice in candidates if kind_of(choice) == part]
        if len(candidates) > 1 and tagged:
            candidates = tagged
            continue
        path.append(part)
        if is_key or part.isdigit():
            is_key = False
            continue
        annotation = _annotation(candidates[0], part) if candidates else None
        candidates = list(_models(annotation))
        is_key = get_origin(annotation) is dict
    return path, candidates[0] if candidates else None


def _annotation(model: type[BaseModel], key: str) -> Any:
    """Return the type of a field by its name or alias; None where there is no such field."""
    for name, field in model.model_fields.items():
        if key in (name, field.alias):
            return field.annotation
    return None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation, through optionals, tuples, unions and kinds."""
    if isinstance(annotation, type) and issubclass(annotation, OfKind) and annotation.is_open():
        yield from annotation.kinds()
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
