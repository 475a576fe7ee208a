"""``rlhf init --prompts FILE --reward FILE.py:FUNCTION``: prompts and a function, no pairs."""

from __future__ import annotations

import ast
import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from flows.workspace import is_elsewhere
from rlhf_core.config.base import SCRATCH
from rlhf_core.config.params import Params
from rlhf_core.config.reward_sources import FunctionSource
from rlhf_core.data.collection.sources import read_sources
from rlhf_core.data.schema import SPLITS, assign
from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_core.fingerprint.tracked_files import function_files, missing_function

PROFILE = "checker"
Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class GivenFunction:
    """A reward function as ``--reward`` names it.

    Attributes:
        target: ``module:function``, as params.yaml has it.
        file: The module's file, which goes into the workspace; None for an installed module.
        columns: The columns that it asks for, without which it cannot be called.
    """

    target: str
    file: Path | None = None
    columns: tuple[str, ...] = ()

    def copy_into(self, workspace: Path) -> None:
        """Copy the file, and what it imports beside it, to where the stages import it from."""
        if self.file is None:
            return
        for name in function_files(self.file.parent, (FunctionSource(target=self.target),)):
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.file.parent / name, workspace / name)


def given_function(reward: str) -> GivenFunction:
    """Find the function that ``FILE.py:FUNCTION`` or ``module:function`` names, without importing.

    Raises:
        ConfigError: There is no such file, module or function, or an installed module would take
            the file's place.
    """
    place, _, name = reward.rpartition(":")
    if not place.endswith(".py"):
        target = FunctionSource(target=reward).target if place else ""
        if not target:
            raise ConfigError(
                f"--reward {reward}: write it as FILE.py:FUNCTION, such as checks.py:score"
            )
        if problem := missing_function(target, Path.cwd()):
            raise ConfigError(f"--reward {reward}: {problem}; nothing was made")
        return GivenFunction(target)
    file = Path(place)
    if not file.is_file():
        raise ConfigError(f"--reward {reward}: there is no file {place}; nothing was made")
    if not file.stem.isidentifier():
        raise ConfigError(
            f"--reward {reward}: {file.stem} is no name of a Python module; rename the file"
        )
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"--reward {reward}: {place} is not Python ({error}); nothing was made"
        ) from error
    functions = {node.name: node for node in tree.body if isinstance(node, Definition)}
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise ConfigError(
            f"--reward {reward}: {place} has no function {name!r}; its functions: {known}"
        )
    installed = find_spec(file.stem)
    if installed is not None and (
        installed.origin is None or Path(installed.origin).resolve() != file.resolve()
    ):
        raise ConfigError(
            f"--reward {reward}: {file.stem} is also an installed module, which would be imported instead of {place}; "
            "rename the file"
        )
    return GivenFunction(f"{file.stem}:{name}", file, _columns_asked(functions[name]))


def _columns_asked(function: Definition) -> tuple[str, ...]:
    """The parameters after prompts and replies that have no default."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    asked = positional[: len(positional) - len(arguments.defaults)][2:]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is None:
            asked.append(argument)
    return tuple(argument.arg for argument in asked)


def checker_settings(prompts: Sequence[str], function: GivenFunction) -> list[str]:
    """The settings by which ``function`` rewards and judges replies to ``prompts``."""
    source = {"kind": "function", "target": function.target}
    return [
        "collect.source=files",
        f"collect.files.prompts={json.dumps(list(prompts))}",
        f"ppo.reward.sources={json.dumps([source])}",
    ]


def require_enough_prompts(params: Params, function: GivenFunction) -> str:
    """Count the prompts of a workspace that is to be made, and say what so many can show.

    Prompts that are not on this machine are left to the run.

    Args:
        params: Relative paths in them start at the current folder.

    Raises:
        RlhfError: There are too few, none would be held out, they lack a column that the function
            asks for, or there is no model to start from.
    """
    files = params.collect.files
    if params.base.source == SCRATCH and not (files.pretrain or files.demonstrations):
        raise ConfigError(
            "there is no model to start from: name one with --model, or texts that one is made from with "
            "--set 'collect.files.pretrain=[\"texts.jsonl\"]'; nothing was made"
        )
    if any(is_elsewhere(source.path) for source in files.prompts):
        return ""
    groups: list[str] = []
    columns: set[str] = set()
    for part in read_sources(files.prompts, "prompts", Path.cwd()):
        for row in part.rows:
            groups.append(row["group"])
            columns.update(json.loads(row["columns"] or "{}"))
    lacking = [name for name in function.columns if name not in columns]
    if lacking:
        raise DataError(
            f"{function.target} asks for {lacking[0]}, which the prompts do not have; their columns: "
            f"{', '.join(sorted(columns)) or 'none'}; nothing was made"
        )
    return _counted(groups, params)


def _counted(groups: Sequence[str], params: Params) -> str:
    """Say how many different prompts train and judge, and which gain so many can show."""
    distinct = list(dict.fromkeys(groups))
    shares = params.validate_.split
    of_split = Counter(assign(distinct, params.seed, shares))
    least = max(params.validate_.min_rows, math.ceil(2 / min(shares.test, shares.validation)))
    if len(distinct) < params.validate_.min_rows or any(not of_split[split] for split in SPLITS):
        raise RlhfError(
            f"{len(distinct)} different prompts are too few: {of_split['test']} would be held out to judge by; give at "
            f"least {least}, or lower validate.min_rows, or raise validate.split.test; nothing was made"
        )
    judged = min(of_split["test"], params.evaluate.prompts)
    shown = 1.96 * math.sqrt(0.5 / judged)
    return (
        f"{of_split['train']} prompts to train on, {judged} held out to judge by, which show a gain in accuracy from "
        f"about {shown:.2f} on"
    )
