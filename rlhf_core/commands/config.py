"""``rlhf config``: every setting of params.yaml with its default and its meaning.

They are read from the models that check them.

A setting is explained where it is declared, in the section "Attributes:" of its class. So an
explanation is no code: changing it makes no stage run again.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_core.config.model import OfKind, kind_of
from rlhf_core.config.problems import nearest
from rlhf_core.errors import ConfigError, RlhfError

# Keys of a mapping that the user chooses, by what they name.
KEYS = {"launch": "STAGE", "pools": "STAGE", "rules": "RULE", "work_pools": "POOL"}


@dataclass(frozen=True)
class Setting:
    """One parameter of params.yaml.

    Attributes:
        path: Its dotted path; entries of lists are ``[]``, those of a union ``[KIND]``, keys of a
            mapping a word in capitals.
        default: As YAML would have it, or what it must be where it has none.
        meaning: What it does.
        paper: What the paper found.
        shows_in: The metrics that show it.
        section: Whether it holds further settings.
    """

    path: str
    default: str
    meaning: str
    paper: str
    shows_in: str
    section: bool


def settings(
    model: type[BaseModel],
    path: str = "",
    defaults: BaseModel | None = None,
    seen: dict[tuple[str, ...], str] | None = None,
) -> Iterator[Setting]:
    """All settings below a path, in their order.

    Args:
        model: What checks them.
        path: The path.
        defaults: Values of the section where it is left out.
        seen: Sections so far, by the names of their settings: another one of the same settings is
            then one row that refers to the first; None lists every setting.
    """
    meanings = explained(model)
    for name, field in model.model_fields.items():
        key = field.alias or name
        if name == "seed" and path:
            continue
        setting_path = f"{path}.{key}" if path else key
        value = (
            getattr(defaults, name)
            if defaults is not None
            else field.get_default(call_default_factory=True)
        )
        submodels = list(_inside(field.annotation, key))
        is_section = isinstance(value, BaseModel)
        setting_names = tuple(submodels[0][1].model_fields) if len(submodels) == 1 else ()
        listed_under = seen.get(setting_names) if seen is not None else None
        meaning, paper, shows_in = _parts(meanings.get(key, "").replace("``", "`"))
        if key == "kind" and not _choices(field.annotation):  # tells the members of a union apart
            meaning = (
                inspect.cleandoc(model.__doc__ or "")
                .partition("\n\n")[0]
                .replace("``", "`")
                .replace("\n", " ")
            )
        if field.is_required() and defaults is None:
            default = _missing(field)
        else:
            default = as_yaml(value) if not is_section or listed_under else ""
        choices = _choices(field.annotation)
        if choices:
            meaning += f" One of {choices}."
        elif listed_under:
            meaning += f" Its settings are those of `{listed_under}`."
        yield Setting(setting_path, default, meaning, paper, shows_in, bool(submodels))
        for suffix, submodel in submodels if not listed_under else ():
            if seen is not None and setting_names:
                seen[setting_names] = setting_path + suffix
            section_values = value if is_section and isinstance(value, submodel) else None
            yield from settings(
                submodel, setting_path + suffix, section_values or _default_of(submodel), seen
            )


def _default_of(model: type[BaseModel]) -> BaseModel | None:
    """Return the model with all its defaults; None where it needs more."""
    if any(field.is_required() for field in model.model_fields.values()):
        return None
    return model()


def explained(model: type[BaseModel]) -> dict[str, str]:
    """Return what the docstrings of ``model`` and its bases say of each field."""
    explanations: dict[str, str] = {}
    for base in reversed(model.__mro__):
        name = ""
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        _, _, attributes = text.partition("Attributes:\n")
        for line in attributes.splitlines():
            entry = re.match(r"    (\w+): (.*)", line)
            if entry is not None:
                name, explanations[entry[1]] = entry[1], entry[2]
            elif name and line.strip():
                explanations[name] += f" {line.strip()}"
    return explanations


def _parts(text: str) -> tuple[str, str, str]:
    """Split an explanation into the meaning, what the paper found, and metrics."""
    text, _, shows_in = text.partition(" Shows in: ")
    meaning, _, paper = text.partition(" Paper: ")
    return meaning, paper.rstrip("."), shows_in.rstrip(".")


def _inside(annotation: Any, key: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the models in an annotation, each after what its fields' paths begin with."""
    if isinstance(annotation, type) and issubclass(annotation, OfKind) and annotation.is_open():
        for model in annotation.kinds():
            yield f"[{kind_of(model)}]", model
        return
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
        return
    origin, arguments = get_origin(annotation), get_args(annotation)
    step = ""
    if origin in (tuple, list):
        step = "[]"
    elif origin in (dict, Mapping):
        step = f".{KEYS.get(key, 'NAME')}"
    models: dict[type[BaseModel], None] = {}
    for argument in arguments:
        models |= dict.fromkeys(model for _, model in _inside(argument, key))
    for model in models:
        if len(models) > 1:
            step = f"[{kind_of(model)}]"
        yield step, model


def _choices(annotation: Any) -> str:
    """Return the values of a ``Literal``, where there are several."""
    literals = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal]
    if len(literals) != 1:
        return ""
    values = get_args(literals[0])
    return ", ".join(map(as_yaml, values)) if len(values) > 1 else ""


def _missing(field: FieldInfo) -> str:
    kinds: dict[Any, str] = {int: "a number", float: "a number", str: "a text", tuple: "a list"}
    annotation = get_origin(field.annotation) or field.annotation
    choices = get_args(field.annotation) if annotation is Literal else ()
    return str(choices[0]) if len(choices) == 1 else f"({kinds.get(annotation, 'needed')})"


def as_yaml(value: Any, within: bool = False) -> str:
    """Return a value on one line, as params.yaml would have it.

    ``within`` a mapping or list a text with a comma is quoted.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True) or value.model_dump(include={"kind"})
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{key}: {as_yaml(item, within=True)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_yaml(item, within=True) for item in value) + "]"
    if isinstance(value, float) and not isinstance(value, bool):
        return re.sub(r"e-0?", "e-", repr(value))
    return (
        value
        if isinstance(value, str) and value and not (within and "," in value)
        else json.dumps(value)
    )


def chosen(path: str | None, known: list[Setting]) -> list[Setting]:
    """Return the setting at ``path`` and those below it.

    Without any, those whose path begins and ends as ``path`` does.

    Raises:
        ConfigError: There is none.
    """
    if path is None:
        return known
    plain_paths = [re.sub(r"\[\w*\]", "", setting.path) for setting in known]
    with_plain_paths = list(zip(known, plain_paths, strict=True))
    at_or_below = [
        setting
        for setting, name in with_plain_paths
        if path in (name, setting.path) or name.startswith(f"{path}.")
    ]
    if at_or_below:
        return at_or_below
    first, _, last = path.rpartition(".")
    similar_paths = [
        setting
        for setting, name in with_plain_paths
        if f".{name}".endswith(f".{last}") and name.startswith(first)
    ]
    if similar_paths:
        return similar_paths
    raise ConfigError(f"no setting '{path}'; {nearest(path, plain_paths)}")


def as_text(setting: Setting, given: Mapping[str, str], width: int) -> str:
    """Return a setting with everything that is known of it.

    ``given`` are the values of params.yaml that are not defaults.
    """
    default = setting.default or "(a section)"
    value_here = f"   here: {given[setting.path]}" if setting.path in given else ""
    lines = [f"{setting.path}: {default}{value_here}"]
    notes = [setting.meaning, f"Paper: {setting.paper}." if setting.paper else ""]
    notes.append(f"Shows in: {setting.shows_in}" if setting.shows_in else "")
    for note in filter(None, notes):
        lines += textwrap.wrap(
            note, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def given_values(file: Path, known: list[Setting]) -> dict[str, str]:
    """By path the values that ``file`` has and that are not the defaults."""
    from rlhf_core.config import yaml_text

    params = yaml_text.plain(yaml_text.read(file))
    changed_values = {}
    for setting in known:
        value: Any = params
        for key in setting.path.split("."):
            value = value.get(key, ...) if isinstance(value, dict) else ...
        if (
            value is not ...
            and not setting.default.startswith("(")
            and not (setting.section and setting.default == "")
        ):
            value_text = as_yaml(
                float(value) if isinstance(value, int) and "." in setting.default else value
            )
            if value_text != setting.default:
                changed_values[setting.path] = value_text
    return changed_values


PAGE = """<!-- Written by `rlhf config --markdown`; change the docstrings of the settings. -->
# Parameters

Every setting of params.yaml with the default of the code (profiles set some). `[]` is an entry of a list, `[KIND]` one
of that kind, a word in capitals a key of your own. Sections in brackets are the paper's; PPO-max is its recipe.
[Switches](switches.md) says which combinations are refused, [Metrics](metrics.md) what shows a setting.
"""


def as_markdown(known: list[Setting]) -> str:
    """The page of parameters: a table for each section."""
    page_lines = [PAGE]
    for section in dict.fromkeys(setting.path.split(".")[0] for setting in known):
        rows = [setting for setting in known if re.split(r"[.\[]", setting.path)[0] == section]
        page_lines += [f"\n## {section}\n", rows[0].meaning, ""]
        rows = [row for row in rows if row.default] or rows
        has_notes = any(row.paper or row.shows_in for row in rows)
        header = [
            "parameter",
            "default",
            "what it does",
            *(["the paper", "shows in"] if has_notes else []),
        ]
        page_lines += [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
        for row in rows:
            metrics = ", ".join(f"`{name}`" for name in row.shows_in.split(", ") if name)
            cells = [
                f"`{row.path}`",
                f"`{row.default}`",
                row.meaning,
                *([row.paper, metrics] if has_notes else []),
            ]
            page_lines.append(
                f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |".replace(
                    "  ", " "
                )
            )
    return "\n".join(page_lines) + "\n"


def show(path: str | None, workspace: Path | None, markdown: bool) -> str:
    """What ``rlhf config PATH`` prints.

    Args:
        path: What is asked for; None for all.
        workspace: Its values are shown where they differ from defaults; None: the one of the
            current folder, if any.
        markdown: Whether the page of parameters is asked for.

    Raises:
        RlhfError: There is no such setting, or the folder that was named is no workspace.
    """
    from rlhf_core.config.loading import PARAMS_FILE
    from rlhf_core.config.params import Params
    from rlhf_core.stages.runtime.runner import workspace_root

    if markdown:
        return as_markdown(list(settings(Params, seen={})))
    known = list(settings(Params)) if path is not None else list(settings(Params, seen={}))
    selected, root = chosen(path, known), None
    try:
        root = workspace_root(workspace)
    except RlhfError:  # outside of a workspace defaults are all there is to say
        if workspace is not None:
            raise
    given = given_values(root / PARAMS_FILE, selected) if root is not None else {}
    width = min(shutil.get_terminal_size().columns, 120)
    return "\n".join(as_text(setting, given, width) for setting in selected) + "\n"
