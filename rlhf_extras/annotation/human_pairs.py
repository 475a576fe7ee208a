"""The pairs that people are asked about, blinded: bad cases, and a random control beside them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import load_section
from rlhf_core.data.schema import Prompt, read_rows, read_table
from rlhf_core.data.statistics import cluster_of
from rlhf_core.data.text import shortened
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.fixed_sets import FixedSets, sampled_model
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.judges.names import JUDGE, MODELS, TRAINED_ON
from rlhf_core.evaluation.regression import fixed_subset
from rlhf_core.runtime.progress import progress
from rlhf_core.sampling.sampler import opened_sampler
from rlhf_core.storage.files import (
    atomic_write_json,
    atomic_write_lines,
    atomic_write_text,
    read_json,
    split_json_lines,
)

EXPORT_NAME = re.compile(r"a[0-9a-f]{8}")
EXPORTS = Path("data") / "annotations" / "exports"
TEST_PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"


@dataclass(frozen=True)
class Candidate:
    """A prompt with the replies of SFT and policy that people may be asked about."""

    prompt: list[dict[str, str]]
    category: str
    cluster: str
    sft_reply: str
    policy_reply: str

    @classmethod
    def of(cls, row: Prompt, category: str, sft_reply: str, policy_reply: str) -> Candidate:
        """Make one of a prompt of the data."""
        turns = [{"role": turn.role, "content": turn.content} for turn in row.prompt]
        return cls(turns, category, cluster_of(row), sft_reply, policy_reply)

    @property
    def key(self) -> str:
        """The hash of the content, which does not depend on who wrote which reply."""
        content = [self.prompt, sorted([self.sft_reply, self.policy_reply])]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class AnnotationPair:
    """One question, and what those who answer it do not see.

    Attributes:
        id: The export's name and the hash of the content.
        reply_1: The reply that is shown first.
        reply_2: The other one.
        policy_reply: 1 or 2: which of them the policy wrote.
        cluster: What the prompt is about: pairs of the same cluster are no independent evidence.
        bad_case: Whether the reward model prefers the policy's reply and the judge SFT's.
        control: Whether it was drawn at random from all pairs.
    """

    id: str
    prompt: list[dict[str, str]]
    reply_1: str
    reply_2: str
    category: str
    cluster: str
    policy_reply: int
    bad_case: bool
    control: bool

    @property
    def prompt_text(self) -> str:
        """The prompt as people read it."""
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in self.prompt)

    def outcome(self, choice: str) -> float:
        """1 if ``choice`` (1, 2 or tie) is for the policy's reply, 0 if for SFT's, ½ for a tie."""
        return 0.5 if choice == "tie" else float(choice == str(self.policy_reply))


@dataclass(frozen=True)
class AnnotationExport:
    """The pairs of one export in the order in which they are shown. ``name`` is a hash of them."""

    name: str
    seed: int
    pairs: Sequence[AnnotationPair]

    def save_key(self, workspace: Path) -> Path:
        """Write what the annotators do not see, and reading their answers needs."""
        path = workspace / EXPORTS / f"{self.name}.json"
        atomic_write_json(
            path,
            {"name": self.name, "seed": self.seed, "pairs": [asdict(pair) for pair in self.pairs]},
        )
        return path

    @classmethod
    def load_key(cls, workspace: Path, name: str) -> AnnotationExport:
        """Read the key of an export.

        Raises:
            DataError: There is none of that name, or it cannot be read.
        """
        path = workspace / EXPORTS / f"{name}.json"
        if not EXPORT_NAME.fullmatch(name) or not path.is_file():
            shown = shortened(name, 60)
            raise DataError(
                f"the export {shown!r} is not of this workspace: there is no key in {workspace / EXPORTS}"
            )
        try:
            content: Mapping[str, Any] = read_json(path)
            return cls(
                content["name"],
                content["seed"],
                [AnnotationPair(**pair) for pair in content["pairs"]],
            )
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{path} is no key of an export ({error}); restore it from a copy"
            ) from error


def evaluated_candidates(workspace: Path) -> tuple[list[Candidate], list[int]]:
    """Return the pairs of the evaluation, each once, and where its bad cases are, worst first.

    Raises:
        DataError: There is no evaluation, or the data are no longer those that it was made with.
    """
    table = read_table(workspace / "samples" / "comparisons.parquet")
    rows = table.select(["id", "category", "sft_reply", "policy_reply"]).to_pylist()
    prompts = {row.id: row for row in read_rows(workspace / TEST_PROMPTS, Prompt)}
    unknown = [row["id"] for row in rows if row["id"] not in prompts]
    if unknown:
        raise DataError(
            f"{len(unknown)} prompts of the evaluation are not in {TEST_PROMPTS} any more; run evaluate again"
        )
    candidates = []
    positions: dict[tuple[str, str, str], int] = {}  # of the first of equal ones
    for position, row in enumerate(rows):
        replies = row["sft_reply"], row["policy_reply"]
        candidates.append(Candidate.of(prompts[row["id"]], row["category"], *replies))
        positions.setdefault(_pair_of(row), position)
    cases = workspace / "samples" / "bad_cases.jsonl"
    if not cases.is_file():
        raise DataError(f"{cases} does not exist; run the stage that writes it")
    lines = split_json_lines(cases.read_text(encoding="utf-8"))
    bad = dict.fromkeys(_pair_of(json.loads(line)) for line in lines)
    return _without_repeats(candidates, [positions[case] for case in bad if case in positions])


def _pair_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What tells rows of the evaluation apart: a prompt may have several replies of each model."""
    return row["id"], row["sft_reply"], row["policy_reply"]


def blinded_export(
    candidates: Sequence[Candidate], bad_cases: Sequence[int], control: int | None, seed: int
) -> AnnotationExport:
    """Choose the pairs, hide who wrote which reply, and shuffle them.

    Pairs of equal replies are left out. The control is drawn from all others, bad cases included,
    so that it stands for them all: only on the control is the share of answers for the policy an
    unbiased win rate.

    Args:
        candidates: All pairs.
        bad_cases: Positions of those to be asked about.
        control: How many to draw at random; None draws as many as there are bad cases.
        seed: Decides the draw, the order, and which reply is shown first.

    Raises:
        DataError: No pair is left to ask about.
    """
    different = [i for i, pair in enumerate(candidates) if pair.sft_reply != pair.policy_reply]
    bad = [i for i in bad_cases if i in set(different)]
    generator = random.Random(seed)
    drawn = generator.sample(
        different, min(len(bad) if control is None else control, len(different))
    )
    by_key = {candidates[i].key: i for i in (*bad, *drawn)}
    if not by_key:
        raise DataError("no pair of different replies was chosen; raise --control or --bad-cases")
    order = sorted(by_key)
    generator.shuffle(order)
    name = "a" + hashlib.sha256("|".join([str(seed), *order]).encode()).hexdigest()[:8]
    pairs = []
    for key in order:
        candidate = candidates[by_key[key]]
        policy_first = hashlib.sha256(f"{seed}|{key}".encode()).digest()[0] % 2 == 0
        replies = candidate.policy_reply, candidate.sft_reply
        first, second = replies if policy_first else replies[::-1]
        pairs.append(
            AnnotationPair(
                id=f"{name}-{key}",
                prompt=candidate.prompt,
                reply_1=first,
                reply_2=second,
                category=candidate.category,
                cluster=candidate.cluster,
                policy_reply=1 if policy_first else 2,
                bad_case=by_key[key] in bad,
                control=by_key[key] in drawn,
            )
        )
    return AnnotationExport(name, seed, pairs)


COLUMNS = ("id", "prompt", "reply_1", "reply_2", "choice", "comment")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
LABEL_STUDIO_CONFIG = """\
<View>
  <Header value="Click the reply that serves the user better, or choose tie"/>
  <Text name="prompt" value="$prompt"/>
  <Pairwise name="choice" toName="reply_1,reply_2"/>
  <View style="display: flex; gap: 1em; margin: 1em 0;">
    <View style="flex: 1; border: 1px solid #aaa; padding: 0.5em;"><Text name="reply_1" value="$reply_1"/></View>
    <View style="flex: 1; border: 1px solid #aaa; padding: 0.5em;"><Text name="reply_2" value="$reply_2"/></View>
  </View>
  <Choices name="tie" toName="prompt" choice="single">
    <Choice value="tie"/>
  </Choices>
</View>
"""


def write_forms(pairs: Sequence[AnnotationPair], folder: Path) -> list[Path]:
    """Write the pairs as JSON lines, as CSV, and as tasks and configuration for Label Studio.

    They hold nothing about who wrote a reply, what chose the pair, or its category.
    """
    rows = []
    for pair in pairs:
        shown = {"prompt": pair.prompt_text, "reply_1": pair.reply_1, "reply_2": pair.reply_2}
        rows.append({"id": pair.id, **shown, "choice": "", "comment": ""})
    jsonl, table = folder / "pairs.jsonl", folder / "pairs.csv"
    tasks, config = folder / "label_studio_tasks.json", folder / "label_studio_config.xml"
    atomic_write_lines(jsonl, rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    questions = []
    for row in rows:
        writer.writerow({name: _no_formula(value) for name, value in row.items()})
        shown = {name: row[name] for name in ("prompt", "reply_1", "reply_2")}
        questions.append({"data": {"pair_id": row["id"], **shown}})
    # With the mark, spreadsheets read it as UTF-8.
    atomic_write_text(table, "\ufeff" + text.getvalue())
    atomic_write_json(tasks, questions)
    atomic_write_text(config, LABEL_STUDIO_CONFIG)
    return [jsonl, table, tasks, config]


def _no_formula(text: str) -> str:
    """A cell as text, where a spreadsheet would take it for a formula.

    Of a filled form only id and choice are read.
    """
    return f"'{text}" if text.startswith(FORMULA) else text


TRAINING_PROMPTS = Path("data") / "clean" / "prompts" / "train.parquet"


def sampled_candidates(
    workspace: Path, count: int, replies_per_prompt: int = 1
) -> tuple[list[Candidate], list[int]]:
    """Let SFT and policy reply to training prompts; return the pairs and places of the bad ones.

    Replies have the evaluation's sampling, bad cases are those of the reward model and the judge.
    With several replies per prompt, the first of SFT is paired with the first of the policy, and so
    on; a pair that repeats counts once.

    Raises:
        DataError: There are no training prompts.
    """
    config = load_section(workspace, "evaluate", EvaluateConfig)
    config = config.model_copy(update={"replies_per_prompt": replies_per_prompt})
    rows = fixed_subset(read_rows(workspace / TRAINING_PROMPTS, Prompt), count, "annotation")
    if not rows:
        raise DataError(f"{workspace / TRAINING_PROMPTS} has no rows")
    sets = FixedSets(rows)
    with (
        opened_sampler(config.sampler, workspace / "work" / "annotation", workspace) as sampler,
        progress(2 * sets.replies(config), "replies to training prompts") as bar,
    ):
        sft, policy = (
            sampled_model(workspace / MODELS / name, sets, config, bar, sampler)
            for name in ("sft", "policy")
        )
    evaluation = Evaluation(sets, sft, policy, config)
    for name in (TRAINED_ON, JUDGE):
        evaluation.score(ModelJudge.load(workspace / MODELS / name, name, config.batch_size))
    candidates = []
    for row, by_sft, by_policy in zip(evaluation.prompts, sft.judged, policy.judged, strict=True):
        candidates.append(Candidate.of(row, row.category, by_sft.text, by_policy.text))
    bad_cases = [position for position, _ in evaluation.disagreements(JUDGE)]
    return _without_repeats(candidates, bad_cases)


def _without_repeats(
    candidates: Sequence[Candidate], bad_cases: Sequence[int]
) -> tuple[list[Candidate], list[int]]:
    """Keep the first of equal pairs, whoever wrote which reply, and its bad cases."""
    first: dict[str, int] = {}
    for position, candidate in enumerate(candidates):
        first.setdefault(candidate.key, position)
    kept = {position: new for new, position in enumerate(first.values())}
    kept_cases = [kept[case] for case in bad_cases if case in kept]
    return [candidates[position] for position in kept], kept_cases
