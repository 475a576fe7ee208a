"""Wrong parameters told in one clear line each: the path, what is wrong, and the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError


def nearest(name: str, valid: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for a close match, else the list of valid names."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known names: {', '.join(names)}"


def describe(error: ValidationError, model: type[BaseModel], prefix: str) -> str:
    """One line per problem of ``error``, joined by newlines. ``prefix`` is the section's name in params.yaml."""
    return "\n".join(_line(problem, model, prefix) for problem in error.errors())


def _line(problem: Any, model: type[BaseModel], prefix: str) -> str:
    location = [str(part) for part in problem["loc"]]
    path = ".".join([prefix, *location]) if prefix else ".".join(location)
    if problem["type"] == "extra_forbidden":
        owner = _model_at(model, location[:-1])
        return f"unknown parameter '{path}'; {nearest(location[-1], _names(owner))}"
    if problem["type"] == "missing":
        return f"parameter '{path}' is missing; add it to params.yaml"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = "" if isinstance(given, dict | BaseModel) else f" (got {given!r})"
    return f"parameter '{path}': {message[0].lower()}{message[1:]}{shown}"


def _names(model: type[BaseModel] | None) -> list[str]:
    """The keys that params.yaml may have for ``model``."""
    return [field.alias or name for name, field in model.model_fields.items()] if model else []


def _model_at(model: type[BaseModel] | None, location: list[str]) -> type[BaseModel] | None:
    """The model that lies at ``location`` inside ``model``, through optional, tuple and mapping annotations."""
    names_a_key = False
    for part in location:
        if model is None:
            return None
        if part.isdigit() or names_a_key:
            names_a_key = False
            continue
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        names_a_key = field is not None and get_origin(field.annotation) is dict
        model = _first_model(field.annotation) if field else None
    return model


def _first_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _first_model(arg))), None)
