"""Which definitions of the core a stage executes: a check of fingerprints that does not look at
names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rlhf_core.fingerprint.stages import NEUTRAL, PACKAGE, package, stage_definition
from rlhf_core.stages.runtime.runner import load_stage

ROOT = Path(sys.modules[PACKAGE].__file__ or "").parent


def reached(stage: str) -> set[str]:
    """Dotted names of the definitions that a stage reaches."""
    return {str(definition) for definition in package().reached(*stage_definition(stage))}


def missed(name: str, call: Callable[[], Any]) -> set[str]:
    """Definitions that the stage's function executes during ``call`` and that its fingerprint does
    not count.
    """
    executed: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        executed.add(frame.f_code)

    stage = load_stage(name)
    run = stage.run

    def traced(*arguments: Any) -> Any:
        sys.settrace(note)
        try:
            return run(*arguments)
        finally:
            sys.settrace(None)

    object.__setattr__(stage, "run", traced)
    try:
        call()
    finally:
        object.__setattr__(stage, "run", run)
    definitions = {definition for code in executed if (definition := _definition(code))}
    assert definitions, "nothing of the package was executed"
    return definitions - reached(name)


def _definition(code: CodeType) -> str | None:
    """The top-level definition that holds ``code``; None for code of other packages, modules and
    neutral ones.
    """
    path = Path(code.co_filename)
    if ROOT not in path.parents or code.co_name == "<module>":
        return None
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    if name in NEUTRAL:
        return None
    module = package().names.module(name)
    assert module is not None
    for definition in module.definitions.values():
        for statement in definition.statements:
            first = min(
                [statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))]
            )
            if first <= code.co_firstlineno <= (statement.end_lineno or statement.lineno):
                return str(definition)
    return f"{name}:{code.co_firstlineno}"
