"""The terms of promotion: what a registered model requires of whoever promotes a version of it.

They are stored with the registered model, so a second workspace cannot take its champion by weaker settings of its own.
The first promotion writes them from its workspace, which becomes the owner. The owner's promotions keep prompts, judge
and stricter bounds up to date; weaker bounds take effect only by ``rlhf terms --set --reason TEXT``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from flows.dvc_repo.lock_file import recorded_hash
from flows.registry.governance.identity import actor, workspace_id
from flows.registry.transactions.aliases import registered_model
from flows.registry.transactions.decisions import utc_now
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.operations.operations import NonInferiorityConfig, RegistryConfig
from rlhf_core.config.stages.evaluate import EvaluateConfig
from rlhf_core.config.stages.gates import Condition, GatesConfig
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.judges.final import JUDGE
from rlhf_core.gates import weaker_conditions
from rlhf_core.storage.files import sha256_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

TERMS_TAG = "rlhf.promotion_terms"
GATES = ("data", "sft", "reward", "policy")
TEST_PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"


@dataclass(frozen=True)
class PromotionTerms:
    """What a promotion must meet, who set it, and what the matches are played on.

    Attributes:
        owner: Id of the workspace that may change the terms.
        workspace: Its folder, for messages.
        set_by: Who set them.
        set_at: When, in UTC.
        bar: What every judge's lower 95 % bound of the win rate must exceed.
        error_budget: Probability of a wrong promotion in all attempts on the same prompts together.
        margins: The section ``registry.non_inferiority``.
        gates: The conditions of each gate.
        prompts: SHA-256 of the test prompts, empty if there are none.
        judge: DVC's hash of the judging model.
        evaluation: Hash of the settings under which replies are sampled and judged.
        approval: Whether a person approves each promotion.
    """

    owner: str
    workspace: str
    set_by: str
    set_at: str
    bar: float
    error_budget: float
    margins: NonInferiorityConfig
    gates: Mapping[str, Sequence[Condition]]
    prompts: str
    judge: str
    evaluation: str
    approval: bool = False

    def to_json(self) -> str:
        """The content of the tag; the reasons of conditions stay in params.yaml."""
        values = {"gates": short_conditions(self.gates), "margins": self.margins.model_dump(mode="json")}
        return json.dumps(asdict(self) | values, sort_keys=True)

    @property
    def origin(self) -> str:
        """Who set the terms, from where and when."""
        return f"{self.set_by} from {self.workspace}, {self.set_at[:16].replace('T', ' ')} UTC"

    def weaker_bounds(self, other: PromotionTerms) -> list[str]:
        """Say which bounds of ``other`` are weaker than these."""
        weaker = []
        if other.bar < self.bar:
            weaker.append(f"registry.promote_win_rate_low95 is {other.bar:g} instead of {self.bar:g}")
        if other.error_budget > self.error_budget:
            weaker.append(f"registry.error_budget is {other.error_budget:g} instead of {self.error_budget:g}")
        for name, margin in self.margins.model_dump().items():
            wider = getattr(other.margins, name)
            if margin is not None and (wider is None or wider > margin):
                value = "null" if wider is None else f"{wider:g}"
                weaker.append(f"registry.non_inferiority.{name} is {value} instead of {margin:g}")
        if self.approval and not other.approval:
            weaker.append("registry.approval is false instead of true")
        return weaker + self.weaker_gates(other.gates)

    def weaker_gates(self, gates: Mapping[str, Sequence[Condition]], names: Sequence[str] = GATES) -> list[str]:
        """Say which conditions of the gates ``names`` are not guaranteed by ``gates``, in a phrase for each gate."""
        weaker = {name: weaker_conditions(gates.get(name, ()), self.gates.get(name, ())) for name in names}
        return [
            f"gates.{name} does not require {', '.join(map(str, conditions))}"
            for name, conditions in weaker.items()
            if conditions
        ]

    def different_match(self, other: PromotionTerms) -> list[str]:
        """Say what matches of ``other`` would be played on that is not what the owner plays on."""
        names = {"prompts": "test prompts", "judge": "judge", "evaluation": "settings in the section evaluate"}
        return [f"other {text}" for name, text in names.items() if getattr(self, name) != getattr(other, name)]


def short_conditions(gates: Mapping[str, Sequence[Condition]]) -> dict[str, list[dict[str, Any]]]:
    """Conditions by gate as JSON, without their reasons and defaults; gates without conditions are left out."""
    return {
        name: [condition.model_dump(mode="json", exclude={"why"}, exclude_defaults=True) for condition in conditions]
        for name, conditions in gates.items()
        if conditions
    }


def read_conditions(gates: Mapping[str, Any]) -> dict[str, tuple[Condition, ...]]:
    """The inverse of :func:`short_conditions`; pydantic's ``ValidationError`` for anything else."""
    return {name: tuple(Condition(**fields, why="") for fields in rows) for name, rows in gates.items()}


def terms_of(workspace: Path, config: RegistryConfig) -> PromotionTerms:
    """The terms that the settings and files of ``workspace`` make, with itself as the owner."""
    gates = load_section(workspace, "gates", GatesConfig)
    evaluation = load_section(workspace, "evaluate", EvaluateConfig).model_dump(mode="json", exclude_none=True)
    prompts = workspace / TEST_PROMPTS
    return PromotionTerms(
        owner=workspace_id(workspace),
        workspace=str(workspace),
        set_by=actor(),
        set_at=utc_now(),
        bar=config.promote_win_rate_low95,
        error_budget=config.error_budget,
        margins=config.non_inferiority,
        gates={name: getattr(gates, name) for name in GATES},
        prompts=sha256_file(prompts) if prompts.is_file() else "",
        judge=recorded_hash(workspace, f"models/{JUDGE}") or "",
        evaluation=hashlib.sha256(json.dumps(evaluation, sort_keys=True).encode()).hexdigest()[:16],
        approval=config.approval,
    )


def read_terms(client: MlflowClient, name: str) -> PromotionTerms | None:
    """The terms of the registered model ``name``; None if it is unknown, or from before there were any.

    Raises:
        RlhfError: The registry does not answer, or the terms cannot be read.
    """
    return terms_of_model(name, registered_model(client, name))


def terms_of_model(name: str, model: RegisteredModel | None) -> PromotionTerms | None:
    """What :func:`read_terms` says, of a registered model that has been looked up."""
    text = None if model is None else model.tags.get(TERMS_TAG)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        terms = TypeAdapter(PromotionTerms).validate_python(fields | {"gates": read_conditions(fields["gates"])})
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise RlhfError(
            f"the terms of promotion of {name} cannot be read (its tag {TERMS_TAG} in MLflow), so nothing is promoted; "
            "write them anew with `rlhf terms --set --take-over --reason TEXT`"
        ) from error
    return terms


def refusal(name: str, held: PromotionTerms | None, here: PromotionTerms, *, forced: bool) -> str:
    """Why the workspace with the terms ``here`` may not promote a version of ``name``; empty if it may."""
    if held is None:
        return ""
    weaker = held.weaker_bounds(here)
    if here.owner == held.owner:
        if not weaker:
            return ""
        change = "`rlhf terms --set --reason TEXT` here makes the weaker terms hold"
        return f"{name} requires more than this workspace: {'; '.join(weaker)} (set by {held.origin}); {change}"
    weaker += held.different_match(here)
    if forced:
        weaker.append("only the owner's workspace forces a promotion")
    if not weaker:
        return ""
    change = "its owner changes the terms there with `rlhf terms --set --reason TEXT`"
    return f"{name} requires more than this workspace: {'; '.join(weaker)} (set by {held.origin}); {change}"


def updated(held: PromotionTerms | None, here: PromotionTerms) -> PromotionTerms:
    """The terms after a promotion: the owner's as they are now, which are nowhere weaker; else those that hold."""
    if held is None:
        return here
    if here.owner != held.owner:
        return held
    unchanged = replace(here, set_by=held.set_by, set_at=held.set_at, workspace=held.workspace)
    return held if unchanged.to_json() == held.to_json() else here
