"""The workspaces of one seed: the finished one that is annotated, and those trained on the annotations of one arm."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.annotated_cases.cases import equal_cases, fill_form, gold_agreement
from benchmarks.annotated_cases.held_out import TRAINING_PAIRS, held_out_pairs, policy_metrics, reward_metrics
from benchmarks.annotated_cases.results import ArmResult
from flows.commands.init import initialise
from flows.dvc_repo.root import cache_of, ensure_dvc
from flows.supervision.processes import child_environment
from flows.workspace.folder import is_workspace
from rlhf_core.config.data import CollectConfig
from rlhf_core.config.loading import load_section
from rlhf_core.data.schema import read_table
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.evaluation.judges.human.answers import ANNOTATIONS, import_answers
from rlhf_core.evaluation.judges.human.pairs import AnnotationExport, AnnotationPair
from rlhf_core.evaluation.judges.names import MODELS
from rlhf_core.storage.files import atomic_dir, atomic_write_json, read_json
from rlhf_core.world.corpus import AnnotatorConfig

FORM = "pairs.jsonl"
KEPT = "seed.json"


@dataclass(frozen=True)
class Sizes:
    """How much is sampled and annotated.

    Attributes:
        cases: Pairs in each of the two annotated sets.
        prompts: At most so many training prompts that pairs are sampled for.
        replies: Replies of SFT and of the policy to each training and each held-out prompt.
        held_out: At most so many held-out prompts.
    """

    cases: int
    prompts: int
    replies: int
    held_out: int


@dataclass(frozen=True)
class SeedExperiment:
    """The arms of one seed.

    Attributes:
        workspace: The workspace without annotations, the arm ``none``.
        folder: Where everything that the experiment makes of this seed lies.
        sizes: How much is annotated.
        ppo: Whether policies are trained and measured, beside reward models.
    """

    workspace: Path
    folder: Path
    sizes: Sizes
    ppo: bool

    @property
    def seed(self) -> int:
        """The seed in the workspace's params.yaml."""
        return load_section(self.workspace, "collect", CollectConfig).seed

    def check(self) -> None:
        """Check that the workspace can be annotated, and that what ``folder`` holds is of it and of the same sizes.

        Raises:
            RlhfError: One of these does not hold.
        """
        collect = load_section(self.workspace, "collect", CollectConfig)
        if collect.source != "world":
            raise RlhfError(
                f"{self.workspace}: gold knows the synthetic world alone, not collect.source {collect.source}"
            )
        for name in ("sft", "reward", "judge", "policy"):
            if not (self.workspace / MODELS / name).is_dir():
                raise DataError(f"{self.workspace / MODELS / name} does not exist; finish the workspace's run first")
        if any((self.workspace / ANNOTATIONS).glob("*.jsonl")):
            raise DataError(f"{self.workspace / ANNOTATIONS} has annotations already; name a workspace without")
        given = {"workspace": str(self.workspace.resolve()), **asdict(self.sizes)}
        if (self.folder / KEPT).is_file() and read_json(self.folder / KEPT) != given:
            raise RlhfError(f"{self.folder} is of another workspace or other sizes; name another --output")
        atomic_write_json(self.folder / KEPT, given)

    def measure(self, arm: str) -> ArmResult:
        """Prepare, train and measure one arm; what is up to date is not done again."""
        metrics: dict[str, float] = {}
        trained = self.workspace
        if arm != "none":
            export = self._export()
            pairs = equal_cases(export.pairs, self.sizes.cases)[arm]
            if not pairs:
                raise DataError(f"{self.workspace}: no bad case on training prompts; raise --prompts or --replies")
            trained = self._annotated(arm, export, pairs)
            reproduce(trained, "ppo" if self.ppo else "reward")
            metrics["annotated"] = float(len(pairs))
            metrics["trained_on"] = float(_annotations_trained_on(trained, export.name))
            agreement = gold_agreement(pairs, self._annotators(), self.seed)
            metrics |= {} if agreement is None else {"labels_as_gold": agreement}
        file = self.folder / "held_out.jsonl"
        held_out = held_out_pairs(file, self.workspace, self.sizes.held_out, self.sizes.replies)
        metrics |= reward_metrics(trained, held_out)
        metrics["test_accuracy"] = float(read_json(trained / "metrics" / "reward.json")["test_accuracy"])
        if self.ppo:
            metrics |= policy_metrics(trained, self.workspace, held_out, self.sizes.replies)
        return ArmResult(self.seed, arm, metrics)

    def _export(self) -> AnnotationExport:
        """Export bad cases and a control of training prompts by ``rlhf annotate export``, once."""
        folder = self.folder / "to-annotate"
        if not folder.is_dir():
            counts = {"prompts": self.sizes.prompts, "replies": self.sizes.replies}
            counts |= {"bad-cases": self.sizes.cases, "control": self.sizes.cases, "seed": self.seed}
            options = [part for name, count in counts.items() for part in (f"--{name}", str(count))]
            with atomic_dir(folder) as part:
                command = [sys.executable, "-m", "rlhf_core", "annotate", "export", str(part), *options]
                run(command, self.workspace)
        with (folder / FORM).open(encoding="utf-8") as stream:
            first = json.loads(stream.readline())["id"]
        return AnnotationExport.load_key(self.workspace, first.partition("-")[0])

    def _annotated(self, arm: str, export: AnnotationExport, pairs: list[AnnotationPair]) -> Path:
        """Make the workspace of an arm with the recipe of the unannotated one, and import its labels there.

        Gates report: an arm that fails one is measured all the same.
        """
        folder = self.folder / arm
        sets = [f"collect.annotations={ANNOTATIONS}/*.jsonl", "gates.mode=report"]
        make_workspace(folder, None, sets, self.workspace)
        export.save_key(folder)
        form = self.folder / f"{arm}.jsonl"
        fill_form(form, pairs, self._annotators(), self.seed)
        import_answers(folder, [form], replace=True)
        return folder

    def _annotators(self) -> AnnotatorConfig:
        """The annotators who labelled the workspace's own preferences."""
        world = load_section(self.workspace, "collect", CollectConfig).world
        return AnnotatorConfig(world.label_sharpness, world.length_bias)


def train_unannotated(folder: Path, profile: str, seed: int) -> None:
    """Make the workspace of a seed and train it to the policy; what is up to date is not done again."""
    make_workspace(folder, profile, [f"seed={seed}", "gates.mode=report"])
    reproduce(folder, "ppo")


def make_workspace(folder: Path, profile: str | None, sets: list[str], base: Path | None = None) -> None:
    """Make a workspace, with the recipe and the DVC cache of ``base`` if that is given; finish one half made."""
    if (folder / ".dvc" / "config").is_file():
        return
    cache = None if base is None else cache_of(base)
    if is_workspace(folder):  # killed before it became a DVC root
        ensure_dvc(folder, cache)
    else:
        initialise(folder, profile, sets, base=base, cache=cache)


def reproduce(workspace: Path, stage: str) -> None:
    """Bring a stage and all it depends on up to date; stages left running by a run that was killed end first."""
    run([sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--quiet", stage], workspace)


def run(command: list[str], workspace: Path) -> None:
    """Run a command in a workspace; its output goes to stderr.

    Raises:
        RlhfError: It fails.
    """
    environment = child_environment(workspace, RLHF_TRACKING="off")
    process = subprocess.run(command, cwd=workspace, env=environment, stdout=sys.stderr)
    if process.returncode:
        raise RlhfError(f"{' '.join(command[2:5])} in {workspace} exited with {process.returncode}; run this again")


def _annotations_trained_on(workspace: Path, export: str) -> int:
    """Count the annotated pairs that validation gave to the reward model, rather than to referee or judge."""
    sources: list[str] = read_table(workspace / TRAINING_PAIRS, ["source"]).column("source").to_pylist()
    return sources.count(f"annotations/{export}")
