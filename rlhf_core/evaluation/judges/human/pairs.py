"""The pairs that people are asked about: bad cases, and a random control beside them; blinded and shuffled."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.data.schema import Prompt, read_rows, read_table
from rlhf_core.errors import DataError
from rlhf_core.storage.files import atomic_write_json, read_json, split_json_lines

EXPORT_NAME = re.compile(r"a[0-9a-f]{8}")
EXPORTS = Path("data") / "annotations" / "exports"
TEST_PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"


@dataclass(frozen=True)
class Candidate:
    """A prompt with the replies of SFT and policy that people may be asked about."""

    prompt: list[dict[str, str]]
    category: str
    sft_reply: str
    policy_reply: str

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
        bad_case: Whether the reward model prefers the policy's reply and the judge SFT's.
        control: Whether it was drawn at random from all pairs.
    """

    id: str
    prompt: list[dict[str, str]]
    reply_1: str
    reply_2: str
    category: str
    policy_reply: int
    bad_case: bool
    control: bool

    @property
    def prompt_text(self) -> str:
        """The prompt as people read it."""
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in self.prompt)

    def outcome(self, choice: str) -> float:
        """1 if ``choice`` (1, 2 or tie) is for the policy's reply, 0 if it is for SFT's, ½ for a tie."""
        return 0.5 if choice == "tie" else float(choice == str(self.policy_reply))


@dataclass(frozen=True)
class AnnotationExport:
    """The pairs of one export in the order in which they are shown. ``name`` is a hash of them."""

    name: str
    seed: int
    pairs: Sequence[AnnotationPair]

    def save_key(self, workspace: Path) -> Path:
        """Write what the annotators do not see, which reading their answers needs, into the workspace."""
        path = workspace / EXPORTS / f"{self.name}.json"
        atomic_write_json(path, {"name": self.name, "seed": self.seed, "pairs": [asdict(pair) for pair in self.pairs]})
        return path

    @classmethod
    def load_key(cls, workspace: Path, name: str) -> AnnotationExport:
        """Read the key of an export.

        Raises:
            DataError: There is none of that name, or it cannot be read.
        """
        path = workspace / EXPORTS / f"{name}.json"
        if not EXPORT_NAME.fullmatch(name) or not path.is_file():
            raise DataError(f"the export {name!r} is not of this workspace: there is no key in {workspace / EXPORTS}")
        try:
            content: Mapping[str, Any] = read_json(path)
            return cls(content["name"], content["seed"], [AnnotationPair(**pair) for pair in content["pairs"]])
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} is no key of an export ({error}); restore it from a copy") from error


def evaluated_candidates(workspace: Path) -> tuple[list[Candidate], list[int]]:
    """Return the pairs of the evaluation, and the positions of its bad cases, worst first.

    Raises:
        DataError: There is no evaluation, or the data are no longer those that it was made with.
    """
    table = read_table(workspace / "samples" / "comparisons.parquet")
    rows = table.select(["id", "category", "sft_reply", "policy_reply"]).to_pylist()
    prompts = {row.id: row.prompt for row in read_rows(workspace / TEST_PROMPTS, Prompt)}
    unknown = [row["id"] for row in rows if row["id"] not in prompts]
    if unknown:
        raise DataError(
            f"{len(unknown)} prompts of the evaluation are not in {TEST_PROMPTS} any more; run evaluate again"
        )
    candidates = [
        Candidate(
            [{"role": turn.role, "content": turn.content} for turn in prompts[row["id"]]],
            row["category"],
            row["sft_reply"],
            row["policy_reply"],
        )
        for row in rows
    ]
    positions = {row["id"]: i for i, row in enumerate(rows)}
    cases = workspace / "samples" / "bad_cases.jsonl"
    if not cases.is_file():
        raise DataError(f"{cases} does not exist; run the stage that writes it")
    bad = [json.loads(line)["id"] for line in split_json_lines(cases.read_text(encoding="utf-8"))]
    return candidates, [positions[case] for case in bad if case in positions]


def blinded_export(
    candidates: Sequence[Candidate], bad_cases: Sequence[int], control: int | None, seed: int
) -> AnnotationExport:
    """Choose the pairs, hide who wrote which reply, and shuffle them.

    Pairs of equal replies are left out. The control is drawn from all others, bad cases included, so that it stands
    for them all: only on the control is the share of answers for the policy an unbiased win rate.

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
    drawn = generator.sample(different, min(len(bad) if control is None else control, len(different)))
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
                policy_reply=1 if policy_first else 2,
                bad_case=by_key[key] in bad,
                control=by_key[key] in drawn,
            )
        )
    return AnnotationExport(name, seed, pairs)
