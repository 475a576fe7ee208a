"""The match of challenger against champion, and its number among the attempts on the same
prompts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.dvc_repo.graph import recorded_hash
from flows.registry.aliases import CONTENT_TAG, registry_errors
from flows.registry.history import EntryTaken, Ledger
from flows.supervision.processes import child_environment, start_supervised
from rlhf_core.config.loading import load_params
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.judges.names import JUDGE
from rlhf_core.evaluation.promotion import Criterion, failed
from rlhf_core.fingerprint.tracked_files import code_lines, verifiable_functions
from rlhf_core.storage.files import atomic_write_json, read_json, sha256_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


PlayMatch = Callable[[Path, Path, Path, int], Mapping[str, Any]]
MATCH_TAG = "match"
MATCHES = Path(".rlhf") / "matches"
MEASURED = 3  # what a match measures; kept results that measured less are played again


def match_question(
    workspace: Path, challenger: ModelVersion, champion: ModelVersion
) -> dict[str, Any]:
    """What a match is about: models, prompts, judge, settings, checks. While it is the same, so is
    the result.

    Where reward functions judge, they are the judge with their settings and code.
    """
    params = load_params(workspace)
    config = params.evaluate
    judge: Any
    if params.collect.pairs:
        judge = recorded_hash(workspace, f"models/{JUDGE}")
    else:
        judge = [source.model_dump(mode="json") for source in params.ppo.reward.sources]
        judge += code_lines(workspace, params.ppo.reward.sources)
    checks = None if config.verifiable is None else workspace / config.verifiable.path
    code = code_lines(workspace, verifiable_functions(config.verifiable))
    return {
        "challenger": challenger.tags[CONTENT_TAG],
        "champion": champion.tags[CONTENT_TAG],
        "prompts": recorded_hash(workspace, "data/clean"),
        JUDGE: judge,
        "settings": config.model_dump(mode="json", exclude_none=True),
        "measured": MEASURED,
        **({"verifiable": sha256_file(checks)} if checks is not None and checks.is_file() else {}),
        **({"functions": code} if code else {}),
    }


def question_digest(question: Mapping[str, Any]) -> str:
    """A short hash by which a question is known."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]


def play_match(
    workspace: Path, champion: Path, challenger: Path, prompt_set: int
) -> dict[str, Any]:
    """Run the match on a set of test prompts in a supervised process and return its result.

    Raises:
        RlhfError: It fails; the last line of its output.
    """
    output = workspace / ".rlhf" / "match.json"
    log = workspace / ".rlhf" / "logs" / "match.log"
    output.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "rlhf_core", "match", "--workspace", str(workspace)]
    command += [
        "--champion",
        str(champion),
        "--challenger",
        str(challenger),
        "--output",
        str(output),
    ]
    command += ["--prompt-set", str(prompt_set)]
    environment = child_environment(workspace)
    ended = start_supervised(
        command, name="match", cwd=workspace, env=environment, log=log
    ).result()
    if ended.exit_code:
        raise RlhfError(
            f"the match ended with code {ended.exit_code}: {ended.error_line} (log: {log})"
        )
    result: dict[str, Any] = read_json(output)
    return result


def decided_by(
    match: Mapping[str, Any], bar: float, criteria: Sequence[Criterion]
) -> tuple[bool, str]:
    """Whether the challenger is promoted by these criteria, and the win rates, or which criteria do
    not hold.

    Every judge's lower 95 % bound of the win rate has to exceed ``bar``. One equal to it does not
    do: two identical models tie everywhere, at exactly one half.
    """
    judges = match.get("comparison") or {}
    if not judges:
        return False, "no judge has compared them"
    measured = {
        name: (result["win_rate"], result["win_rate_low95"])
        for name, result in sorted(judges.items())
        if None not in (result["win_rate"], result["win_rate_low95"])  # null is what was not finite
    }
    short = sorted(name for name in judges if name not in measured or not measured[name][1] > bar)
    rates = ", ".join(
        f"{name} win rate {measured[name][0]:.3f} (at least {measured[name][1]:.3f})"
        if name in measured
        else f"{name} win rate not measured"
        for name in sorted(judges)
    )
    unmet = [str(criterion) for criterion in failed(criteria) if not criterion.is_plain_win_rate]
    if short:
        lost = f"not above {bar:g} with 95 % confidence by {' and '.join(short)}: {rates}"
        return False, "; ".join([lost, *unmet])
    return not unmet, "; ".join(
        unmet
    ) or f"above {bar:g} with 95 % confidence by every judge: {rates}"


TEST_PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"
TRIES = 20  # other machines may take a number at the same time


def make_attempt(
    client: MlflowClient,
    workspace: Path,
    config: RegistryConfig,
    challenger: ModelVersion,
    champion: ModelVersion,
    play: Callable[[int], Mapping[str, Any]],
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Number the match, and play it unless it was played before.

    With ``registry.prompt_sets`` attempt k is played on set ``(k - 1) mod prompt_sets`` of the test
    prompts. The result is kept in ``.rlhf/matches`` and its hash in a tag of the challenger: a file
    whose hash is not the recorded one was not written by a match, and is replaced by playing.

    Args:
        play: Plays the match on the set of prompts with this index.

    Returns:
        The number of the match among those on the same test prompts, from 1, what it was about, and
        what it measured.
    """
    sets = config.prompt_sets
    question = match_question(workspace, challenger, champion) | (
        {"prompt_sets": sets} if sets > 1 else {}
    )
    number = attempt_number(client, workspace, config.policy, question_digest(question))
    index = (number - 1) % sets
    if sets > 1:
        question["prompt_set"] = index + 1
    digest = question_digest(question)
    kept, tag = workspace / MATCHES / f"{digest}.json", f"{MATCH_TAG}.{digest}"
    if not kept.is_file() or challenger.tags.get(tag) != sha256_file(kept):
        atomic_write_json(kept, dict(play(index)))
        with registry_errors("record the match"):
            client.set_model_version_tag(
                challenger.name, str(challenger.version), tag, sha256_file(kept)
            )
    return number, question, read_json(kept)


def attempt_number(client: MlflowClient, workspace: Path, model: str, digest: str) -> int:
    """The number of the match with this digest among those of ``model`` on the test prompts of
    ``workspace``, from 1.

    A question that was numbered before keeps its number: its match is not played again.

    Raises:
        RlhfError: There are no test prompts.
    """
    prompts = workspace / TEST_PROMPTS
    if not prompts.is_file():
        raise RlhfError(f"there are no test prompts ({TEST_PROMPTS}), so nothing can be compared")
    ledger = Ledger.open(client, model, kind=f"attempts.{sha256_file(prompts)[:16]}")
    for _ in range(TRIES):
        known = list(ledger.entries())
        if digest in known:
            return known.index(digest) + 1
        try:
            ledger.append(len(known) + 1, digest)
        except EntryTaken:
            continue
        return len(known) + 1
    raise RlhfError(
        f"could not number the attempt on {model}: others promote at the same time; try again"
    )
