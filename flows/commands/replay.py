"""``rlhf replay``: recorded requests answered by the challenger, compared with what users got."""

from __future__ import annotations

from pathlib import Path

from flows.commands.serve import PolicyChoice, served_source
from flows.registry.aliases import CHALLENGER
from flows.workspace.folder import find_workspace
from rlhf_core.config.evaluate import EvaluateConfig
from rlhf_core.config.loading.load import load_section
from rlhf_core.errors import DataError
from rlhf_core.evaluation.judges.final import MODELS, judging_model, stand_in_note
from rlhf_core.serving.replay import Replay

NAMES = {
    "words": "words",
    "repetition": "repeated trigrams",
    "distinct_2": "distinct bigrams",
    "missing_eos": "missing ends",
}


def replay_record(workspace: Path | None, record: Path, choice: PolicyChoice, output: Path | None) -> str:
    """Answer the requests of ``record`` by the policy of ``choice``, the challenger by default, and say how it did.

    Raises:
        RlhfError: The record, the policy or the workspace's judge is missing or damaged.
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
    config, name = load_section(folder, "evaluate", EvaluateConfig), judging_model(folder)
    judge = ModelJudge.load(folder / MODELS / name, name, config.batch_size)
    done = replay(policy, recorded, judge, config)
    lines = [*describe_replay(done, revision.id, name)]
    if output is not None:
        write_rows(output, done.rows)
        lines.append(f"requests, both replies and their scores, which are users' texts: {output}")
    return "\n".join(lines)


def describe_replay(done: Replay, policy: str, judge: str) -> list[str]:
    """Say in lines how many requests were replayed, what the judge prefers and what changed in the texts."""
    models = " and ".join(f"{count} of {model}" for model, count in sorted(done.models.items()))
    skipped = f"; {done.skipped} requests do not fit into its context" if done.skipped else ""
    result, note = done.comparison, stand_in_note([judge])
    lines = [
        f"{policy} answered {sum(done.models.values())} recorded requests ({models}){skipped}",
        f"win rate by the {judge} {result.win_rate:.3f} ({result.win_rate_low95:.3f} to {result.win_rate_high95:.3f})"
        + (f"; {note}" if note else ""),
    ]
    if result.lc_win_rate is not None:
        bounds = f"{result.lc_win_rate_low95:.3f} to {result.lc_win_rate_high95:.3f}"
        lines.append(f"at equal lengths {result.lc_win_rate:.3f} ({bounds})")
    old, new = done.recorded_text, done.replayed_text
    changes = (f"{NAMES[name]} {old[name]:.3g} → {new[name]:.3g}" for name in old)
    lines.append(", ".join(changes))
    return lines
