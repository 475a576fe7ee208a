"""``rlhf replay``: recorded requests answered by the challenger, compared with what users got."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from flows.commands.serving.serve import PolicyChoice, served_source
from flows.registry.transactions.aliases import CHALLENGER
from flows.workspace.folder import find_workspace
from rlhf_core.config.loading.load import load_section
from rlhf_core.config.stages.evaluate import EvaluateConfig
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import Comparison
from rlhf_core.evaluation.judges.final import JUDGE, MODELS
from rlhf_core.evaluation.replies.replayed import ReplayOutcome, save_replay
from rlhf_core.serving.replay import Replay

NAMES = {
    "words": "words",
    "repetition": "repeated trigrams",
    "distinct_2": "distinct bigrams",
    "missing_eos": "missing ends",
}


def replay_record(
    workspace: Path | None, record: Path, choice: PolicyChoice, output: Path | None, listed: int = 12
) -> str:
    """Answer the requests of ``record`` by the policy of ``choice``, the challenger by default, and say how it did.

    The outcome is kept for the report of the workspace, with the first ``listed`` requests and both replies to them.

    Raises:
        RlhfError: The record or the policy is missing, or the workspace's judge is damaged.
    """
    folder = find_workspace(workspace)
    if choice == PolicyChoice():
        choice = PolicyChoice(alias=CHALLENGER)
    if output is not None and output.exists():
        raise DataError(f"{output} exists; name a new file with --output")
    from rlhf_core.evaluation.judges.model import ModelJudge
    from rlhf_core.serving.loaded_policy import LoadedPolicy
    from rlhf_core.serving.replay import read_record, replay, write_rows

    recorded = read_record(record)
    source = served_source(folder, choice).source
    revision = source.latest()
    policy = LoadedPolicy.load(revision, source.files(revision))
    config, name = load_section(folder, "evaluate", EvaluateConfig), JUDGE
    judge = None
    if (folder / MODELS / name).is_dir():
        judge = ModelJudge.load(folder / MODELS / name, name, config.batch_size)
    done = replay(policy, recorded, judge, config)
    outcome = outcome_of(done, revision.id, name, record, listed)
    lines = [*describe_replay(done, revision.id, name), *_keep(folder, outcome)]
    if output is not None:
        write_rows(output, done.rows)
        lines.append(f"requests, both replies and their scores, which are users' texts: {output}")
    return "\n".join(lines)


def outcome_of(done: Replay, policy: str, judge: str, record: Path, listed: int) -> ReplayOutcome:
    """What the report says of a replay, with its first ``listed`` pairs of replies."""
    replies = [
        {
            "prompt": "\n".join(f"{turn['role']}: {turn['content']}" for turn in row["messages"])
            if len(row["messages"]) > 1
            else row["messages"][0]["content"],
            "recorded": row["recorded"]["reply"],
            "replayed": row["replayed"]["reply"],
            "scores": [row["recorded"]["score"], row["replayed"]["score"]] if done.comparison else [],
        }
        for row in done.rows[:listed]
    ]
    return ReplayOutcome(
        policy=policy,
        record=record.name,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        models=done.models,
        skipped=done.skipped,
        judge=judge if done.comparison else "",
        comparison=done.comparison.as_dict() if done.comparison else {},
        recorded_text=done.recorded_text,
        replayed_text=done.replayed_text,
        replies=replies,
    )


def _keep(workspace: Path, outcome: ReplayOutcome) -> list[str]:
    save_replay(workspace, outcome)
    texts = f", with {len(outcome.replies)} requests and their replies: users' texts" if outcome.replies else ""
    return [f"`rlhf run` puts this into report.html{texts}"]


def describe_replay(done: Replay, policy: str, judge: str) -> list[str]:
    """Say in lines how many requests were replayed, what the judge prefers and what changed in the texts."""
    models = " and ".join(f"{count} of {model}" for model, count in sorted(done.models.items()))
    skipped = f"; {done.skipped} requests do not fit into its context" if done.skipped else ""
    lines = [
        f"{policy} answered {sum(done.models.values())} recorded requests ({models}){skipped}",
        *_describe_comparison(done.comparison, judge),
    ]
    old, new = done.recorded_text, done.replayed_text
    changes = (f"{NAMES[name]} {old[name]:.3g} → {new[name]:.3g}" for name in old)
    lines.append(", ".join(changes))
    return lines


def _describe_comparison(result: Comparison | None, judge: str) -> list[str]:
    if result is None:
        return ["no judge compared the replies: the workspace has neither judge nor referee"]
    lines = [
        f"win rate by the {judge} {result.win_rate:.3f} ({result.win_rate_low95:.3f} to {result.win_rate_high95:.3f})"
    ]
    if result.lc_win_rate is not None:
        bounds = f"{result.lc_win_rate_low95:.3f} to {result.lc_win_rate_high95:.3f}"
        lines.append(f"at equal lengths {result.lc_win_rate:.3f} ({bounds})")
    return lines
