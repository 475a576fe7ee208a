"""Results of other runs that a report shows beside its own: other ways to better replies than SFT's.

``rlhf compare --output`` writes them. A row says where it comes from and what it was judged on, so that a report takes
none that was judged on other prompts, by another judge or against another SFT model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlhf_core.config import yaml_text
from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.storage.files import atomic_write_json, read_json

FORMAT = 1
POLICY = "models/policy"
# What two evaluations must have read alike, and what it means where they did not.
INPUTS = {
    "data/clean": "other data, and so other test prompts",
    "models/sft": "another SFT model",
    "models/judge": "another judge",
}
# Settings of section evaluate that change replies or verdicts; the others add measurements.
SETTINGS = {"prompts", "replies_per_prompt", "sampling", "tie_margin"}


@dataclass(frozen=True)
class EvaluationBasis:
    """What an evaluation was made on, as dvc.lock records it.

    Attributes:
        inputs: Hash of each of ``INPUTS`` that is recorded.
        settings: The settings that must be alike, as JSON.
        policy: Hash of the policy; empty for replies that no policy wrote.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""
    policy: str = ""


@dataclass(frozen=True)
class AlternativeRun:
    """One way to a reply, with its results and where they come from. None is what was not measured.

    Attributes:
        workspace: The folder of the run, as it was typed.
        method: ``PPO``, ``DPO``, ``RLOO``, ``best of 16``, …
        seed: The seed of its recipe.
        git_revision: The commit of its workspace.
        dvc_lock: sha256 of its dvc.lock.
        basis: What it was judged on.
        gold, judge: Mean scores of its replies.
        by_judge, by_gold: ``win_rate`` against SFT with ``win_rate_low95`` and ``win_rate_high95``; may be empty.
        kl: From SFT in nats per reply; an upper bound where ``kl_is_bound``.
        length: Tokens per reply.
        sampled_per_reply: Tokens that are generated for each reply that is used.
        seconds: Time in the training loops after SFT.
        sampled_tokens, trained_tokens: What the policy was trained with.
        gate: What the policy gate decided; empty where none judges.
    """

    workspace: str
    method: str
    seed: int | None
    git_revision: str
    dvc_lock: str
    basis: EvaluationBasis
    gold: float | None
    judge: float | None
    by_judge: Mapping[str, float | None]
    by_gold: Mapping[str, float | None]
    kl: float | None
    kl_is_bound: bool
    length: float | None
    sampled_per_reply: float | None
    seconds: float | None
    sampled_tokens: int | None
    trained_tokens: int | None
    gate: str


def save_alternatives(path: Path, runs: Sequence[AlternativeRun]) -> None:
    """Write runs as JSON."""
    atomic_write_json(path, {"format": FORMAT, "runs": [asdict(run) for run in runs]})


def read_alternatives(path: Path) -> list[AlternativeRun]:
    """Read what :func:`save_alternatives` wrote; none where there is no file.

    Raises:
        DataError: The file is no such file.
    """
    if not path.is_file():
        return []
    content = read_json(path)
    try:
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')!r}, not {FORMAT}")
        return TypeAdapter(list[AlternativeRun]).validate_python(content.get("runs"))
    except (ValidationError, ValueError, AttributeError) as error:
        reason = str(error).replace("\n", " ")[:200]
        raise DataError(f"{path} is no file of `rlhf compare --output` ({reason}); write it anew") from error


def evaluation_basis(lock: Path) -> EvaluationBasis:
    """Read from dvc.lock what the last evaluation was made on; empty where nothing is recorded."""
    try:
        stages = (yaml_text.plain(yaml_text.read(lock)) if lock.is_file() else {}).get("stages") or {}
    except RlhfError:
        return EvaluationBasis()
    stage = stages.get("evaluate") or {}
    read = {dep["path"]: str(dep["md5"]) for dep in stage.get("deps") or [] if "md5" in dep}
    recorded = ((stage.get("params") or {}).get("params.yaml") or {}).get("evaluate") or {}
    inputs = {path: read[path] for path in INPUTS if path in read}
    return EvaluationBasis(inputs, _settings(recorded), read.get(POLICY, ""))


def refused_because(run: AlternativeRun, own: EvaluationBasis) -> str:
    """Why a run must not stand beside those of a workspace with the basis ``own``; empty if it may."""
    if set(own.inputs) != set(INPUTS):
        return "dvc.lock does not record what this workspace was evaluated on"
    other = [f"{what} ({path})" for path, what in INPUTS.items() if run.basis.inputs.get(path) != own.inputs.get(path)]
    if run.basis.settings != own.settings:
        other.append(f"other settings in section evaluate ({', '.join(sorted(SETTINGS))})")
    return "; ".join(other)


def _settings(recorded: Mapping[str, Any]) -> str:
    """The settings that must be alike with their defaults, as JSON."""
    try:
        values: Mapping[str, Any] = EvaluateConfig.model_validate(recorded).model_dump(mode="json")
    except ValidationError:  # of another version
        values = recorded
    return json.dumps({name: values.get(name) for name in sorted(SETTINGS)}, sort_keys=True)
