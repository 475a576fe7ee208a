"""Who becomes champion: by match, by a person's approval or by force, and how to go back.

A challenger is promoted only if every judge's lower 95 % bound clears the threshold.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.dvc_repo.graph import recorded_hash
from flows.registry.client import (
    CHALLENGER,
    CHAMPION,
    CONDITIONS_TAG,
    CONTENT_TAG,
    GATES_PASSED,
    GATES_TAG,
    OWNER_TAG,
    PREVIOUS,
    REWARD_VERSION_TAG,
    UNGATED_TAG,
    registry_errors,
    tag_line,
    versions,
)
from flows.registry.decisions import (
    REPORT_TAG,
    PromotionDecision,
    RollbackDecision,
    as_report,
    commit,
    new_entry,
    publish_decision,
    read_report,
    registry_session,
    utc_now,
)
from flows.registry.history import (
    APPROVE,
    DECLINE,
    REQUEST,
    WITHDRAW,
    EntryTaken,
    Ledger,
    ReleaseState,
)
from flows.registry.stored_models import COMPLETE_TAG, verified_folder
from flows.supervision.processes import child_environment, start_supervised
from flows.workspace import actor, ownership, printed_line
from rlhf_core.config.gates import Condition
from rlhf_core.config.loading import load_params
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.judges.names import JUDGE
from rlhf_core.evaluation.promotion import (
    conclude,
    non_inferiority_criteria,
    win_rate_criteria,
)
from rlhf_core.fingerprint.tracked_files import code_lines, verifiable_functions
from rlhf_core.gates import GATES, weaker_conditions
from rlhf_core.storage.files import atomic_write_json, read_json, sha256_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


ROLLED_BACK_TAG, DECLINED_TAG = "rolled_back", "declined"
REASON_LIMIT = 1000
PlayMatch = Callable[[Path, Path, Path, int], Mapping[str, Any]]
MATCH_TAG = "match"
MATCHES = Path(".rlhf") / "matches"
MEASURED = 3  # what a match measures; kept results that measured less are played again
TEST_PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"
TRIES = 20  # other machines may take a number at the same time


def match_question(
    workspace: Path, challenger: ModelVersion, champion: ModelVersion
) -> dict[str, Any]:
    """What a match is about: models, prompts, judge, settings and checks.

    The same question has the same result. Where reward functions judge, they are the judge, with
    their settings and code.
    """
    params = load_params(workspace)
    config = params.evaluate
    judge: Any
    if params.collect.pairs:
        judge = recorded_hash(workspace, f"models/{JUDGE}")
    else:
        judge = [source.model_dump(mode="json") for source in params.ppo.reward.sources]
        judge += code_lines(workspace, params.ppo.reward.sources)
    question: dict[str, Any] = {
        "challenger": challenger.tags[CONTENT_TAG],
        "champion": champion.tags[CONTENT_TAG],
        "prompts": recorded_hash(workspace, "data/clean"),
        JUDGE: judge,
        "settings": config.model_dump(mode="json", exclude_none=True),
        "measured": MEASURED,
    }
    if config.verifiable is not None and (workspace / config.verifiable.path).is_file():
        question["verifiable"] = sha256_file(workspace / config.verifiable.path)
    code = code_lines(workspace, verifiable_functions(config.verifiable))
    if code:
        question["functions"] = code
    return question


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
    command += ["--champion", str(champion), "--challenger", str(challenger)]
    command += ["--output", str(output), "--prompt-set", str(prompt_set)]
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


def make_attempt(
    state: ReleaseState,
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
    sets = state.config.prompt_sets
    question = match_question(state.workspace, challenger, champion)
    if sets > 1:
        question["prompt_sets"] = sets
    digest = question_digest(question)
    number = attempt_number(state.client, state.workspace, state.config.policy, digest)
    index = (number - 1) % sets
    if sets > 1:
        question["prompt_set"] = index + 1
    digest = question_digest(question)
    kept, tag = state.workspace / MATCHES / f"{digest}.json", f"{MATCH_TAG}.{digest}"
    if not kept.is_file() or challenger.tags.get(tag) != sha256_file(kept):
        atomic_write_json(kept, dict(play(index)))
        number_of_version = str(challenger.version)
        with registry_errors(state.client, "record the match"):
            state.client.set_model_version_tag(
                challenger.name, number_of_version, tag, sha256_file(kept)
            )
    return number, question, read_json(kept)


def attempt_number(client: MlflowClient, workspace: Path, model: str, digest: str) -> int:
    """The number, from 1, of a match among those of ``model`` on the same test prompts.

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


def promote(
    workspace: Path,
    *,
    version: str | None = None,
    force_reason: str | None = None,
    dry_run: bool = False,
    approval: bool = False,
    play: PlayMatch = play_match,
) -> PromotionDecision:
    """Decide whether the challenger becomes ``@champion``, act on it, and report the decision.

    The registered files must be the ones that the gates judged, and the version must have passed
    every gate. Only the workspace that owns the registered model promotes
    (:func:`flows.workspace.ownership`). Where there was never a champion the challenger
    then takes the place at once; else every criterion of :mod:`rlhf_core.evaluation.promotion` must
    hold. With ``registry.approval`` a challenger that passes is not promoted, forced or not: it
    waits for :func:`approve`.

    Args:
        version: The version to promote; default: the one that ``@challenger`` points to.
        force_reason: Promote whatever gates and match say; the reason is recorded. Changed files
            stay refused, and so does a workspace that does not own the registered model.
        dry_run: Decide and change nothing.
        approval: Ask a person although the settings do not.
        play: Plays the match of two model folders
            ``(workspace, champion, challenger, prompt_set)``.

    Raises:
        RlhfError: The registry does not answer, there is no challenger, or its files have changed.
            Nothing has moved.
    """
    workspace = workspace.resolve()
    if force_reason is not None:
        _required_reason(
            force_reason, "a forced promotion needs a reason; add --reason TEXT, it is recorded"
        )
    with registry_session(workspace) as state:
        config, owner = state.config, {OWNER_TAG: ownership(workspace)}
        challenger = state.version_with(CHALLENGER) if version is None else state.version(version)
        if challenger is None:
            raise RlhfError(_no_challenger(state))
        champion = state.version_with(CHAMPION)
        decision = _decide(state, challenger, champion, force_reason, play)
        decision = replace(decision, dry_run=dry_run)
        entry: Mapping[str, Any] | None = None
        if approval or config.approval:
            decision, entry = _requested_approval(state, decision, owner)
        elif decision.promoted and not dry_run:
            champions = [*state.champions, decision.challenger]
            entry = _champion_entry(state, champions, decision, model_tags=owner)
        if dry_run or decision.unchanged:
            return decision
        if entry is not None:
            return replace(decision, report=commit(state, entry))
        with registry_errors(state.client, "record the decision; nothing has moved"):
            report = publish_decision(
                state.client, workspace, decision.challenger, as_report(decision)
            )
        return replace(decision, report=report)


def _requested_approval(
    state: ReleaseState, decision: PromotionDecision, owner: Mapping[str, str]
) -> tuple[PromotionDecision, Mapping[str, Any] | None]:
    """Let a person approve what was decided; returns the decision and its entry in the history."""
    request, model = state.request, decision.model
    judged = (decision.challenger, decision.champion)
    is_open = request is not None and request.is_open
    if request is not None and (request.challenger, request.champion) != judged:
        is_open = False  # that request is about other versions
    if decision.promoted:
        decision = replace(decision, promoted=False, awaiting_approval=True, unchanged=is_open)
        moves = []
        # A version that was named is the challenger from its request on.
        if state.aliases.get(CHALLENGER) != decision.challenger:
            moves.append((model, CHALLENGER, decision.challenger))
        reason = decision.reason
        entry = new_entry(model, REQUEST, reason, moves=moves, decision=decision, model_tags=owner)
        return decision, entry
    if is_open and decision.match is not None:
        decision = replace(decision, unchanged=False)
        return decision, new_entry(model, WITHDRAW, decision.reason, decision=decision)
    return decision, None


def _required_reason(reason: str, otherwise: str) -> str:
    """The reason on one line; ``RlhfError`` with the text ``otherwise`` if it is empty."""
    line = printed_line(reason)
    if not line:
        raise RlhfError(otherwise)
    return line


def _no_challenger(state: ReleaseState) -> str:
    """Say that there is nothing to promote, and why the newest version is no challenger."""
    nothing = f"{state.config.policy} has no @{CHALLENGER}"
    registered = versions(state.client, state.config.policy)
    if not registered:
        return f"{nothing}; `rlhf run` registers one once its gates pass"
    number = registered[0].version
    obstacle = promotion_obstacle(registered[0], None)
    if obstacle:
        return (
            f"{nothing}: {obstacle}; a run whose gates pass registers one, and `rlhf promote --version {number} "
            "--force --reason TEXT` takes this one"
        )
    return (
        f"{nothing}, which was taken from version {number} by something else than rlhf; `rlhf promote --version "
        f"{number}` judges that version"
    )


def _decide(
    state: ReleaseState,
    challenger: ModelVersion,
    champion: ModelVersion | None,
    force_reason: str | None,
    play: PlayMatch,
) -> PromotionDecision:
    """Judge the challenger: by its owner, its record, and a match against the champion."""
    client, workspace, bar = state.client, state.workspace, state.config.promote_win_rate_low95
    decision = PromotionDecision(
        model=state.config.policy,
        challenger=str(challenger.version),
        champion=None if champion is None else str(champion.version),
        bar=bar,
        forced=force_reason,
    )
    if champion is not None and champion.version == challenger.version:
        return decision.refused("the challenger is the champion already", unchanged=True)
    if not_allowed := state.not_the_owner:
        return decision.refused(not_allowed, unchanged=True)
    folder = verified_folder(workspace, challenger, client)
    obstacle = promotion_obstacle(challenger, gate_conditions(workspace))
    if obstacle and force_reason is None:
        reason = f"{obstacle}; promote it with --force --reason TEXT"
        return decision.refused(reason, unchanged=True)
    if champion is None:
        reason = state.removed_champion
        if reason and force_reason is None:  # without the alias it would be spared a match
            return decision.refused(reason, unchanged=True)
        passed = True  # else it is forced
    else:
        try:
            champion_files = verified_folder(workspace, champion, client)
            number, question, match = make_attempt(
                state,
                challenger,
                champion,
                lambda prompt_set: play(workspace, champion_files, folder, prompt_set),
            )
            criteria = (
                *win_rate_criteria(match, bar, state.config.error_budget, number),
                *non_inferiority_criteria(match, state.config.non_inferiority),
            )
            decision = replace(
                decision, question=question, match=match, attempt=number, criteria=criteria
            )
            passed, reason = conclude(criteria, bar)
        except RlhfError as error:
            if force_reason is None:
                raise
            passed, reason = False, f"no match: {error}"
    reason = "; ".join(part for part in (obstacle, reason) if part) or "there was no champion"
    if force_reason is not None:
        return decision.accepted(f"forced: {printed_line(force_reason)} (otherwise: {reason})")
    if passed:
        return decision.accepted(reason)
    known = read_report(workspace, challenger.tags.get(REPORT_TAG, ""))
    before = (known.get("question"), known.get("bar"), known.get("reason"))
    is_known = before == (decision.question, bar, reason)
    return decision.refused(reason, unchanged=is_known)


def approve(workspace: Path, reason: str = "", version: str | None = None) -> PromotionDecision:
    """Make the version that waits for approval the champion, and record who approved it.

    Nothing is judged anew: the request in the history says that the version passed, and it stands
    only while champion and challenger are those that it was judged by.

    Args:
        reason: Recorded with the decision.
        version: The version that was looked at; another one in its place is refused.

    Raises:
        RlhfError: No version waits, it is another one, the registry has changed since, or its files
            have. Nothing has moved.
    """
    workspace = workspace.resolve()
    with registry_session(workspace) as state:
        planned = _requested(state, version)
        challenger = state.version(planned.challenger)
        verified_folder(workspace, challenger, state.client)
        obstacle = promotion_obstacle(challenger)
        if obstacle and planned.forced is None:
            raise RlhfError(f"{obstacle}; it cannot be approved")
        why = printed_line(reason)[:REASON_LIMIT]
        approval = f"approved by {actor()}" + (f": {why}" if why else "")
        decision = replace(planned, approval=approval).accepted(f"{approval} ({planned.reason})")
        entry = _champion_entry(
            state, [*state.champions, planned.challenger], decision, action=APPROVE
        )
        return replace(decision, report=commit(state, entry))


def decline(workspace: Path, reason: str, version: str | None = None) -> PromotionDecision:
    """Refuse the version that waits for approval, and record who did and why; nothing moves.

    The version is marked as declined: only a forced promotion asks for its approval again.

    Args:
        reason: Recorded with the decision.
        version: The version that was looked at; another one in its place is refused.

    Raises:
        RlhfError: The reason is empty, no version waits, it is another one, or the registry has
            changed since.
    """
    why = _required_reason(reason, "declining needs a reason; add --reason TEXT, it is recorded")[
        :REASON_LIMIT
    ]
    with registry_session(workspace) as state:
        planned, approval = _requested(state, version), f"declined by {actor()}: {why}"
        decision = replace(planned, approval=approval).refused(approval)
        declined = (planned.model, planned.challenger, DECLINED_TAG, approval)
        entry = new_entry(
            planned.model, DECLINE, approval, version_tags=[declined], decision=decision
        )
        return replace(decision, report=commit(state, entry))


def _requested(state: ReleaseState, version: str | None) -> PromotionDecision:
    """The promotion that waits for approval, without its match, which the report has."""
    recorded = state.open_request(version).entry["decision"]
    elsewhere = ("report", "match", "question", "criteria")
    kept = [field.name for field in fields(PromotionDecision) if field.name not in elsewhere]
    planned = PromotionDecision(**{name: recorded[name] for name in kept if name in recorded})
    return replace(planned, awaiting_approval=False, who=actor(), time=utc_now())


def rollback(workspace: Path, reason: str, to: str | None = None) -> RollbackDecision:
    """Make an earlier champion the champion again, with the reward model behind it, and record why.

    The version that is replaced is marked as rolled back: it leaves the history of champions, so a
    second rollback goes further back, and only a forced promotion brings it back.

    Args:
        reason: Recorded with the decision.
        to: A version that has been champion before; default: the champion before the present one.

    Raises:
        RlhfError: The reason is empty, there is nothing to go back to, or the files of the target
            have changed.
    """
    workspace = workspace.resolve()
    reason = _required_reason(reason, "a rollback needs a reason; say why, it is recorded")
    with registry_session(workspace) as state:
        policy, champion = state.config.policy, state.version_with(CHAMPION)
        champions = state.champions
        if champion is None or len(champions) < 2:
            raise RlhfError(
                f"{policy} has no earlier champion to go back to; `rlhf status` shows what there is"
            )
        if to is not None and to not in champions[:-1]:
            earlier = ", ".join(champions[:-1])
            raise RlhfError(
                f"version {to} of {policy} is no earlier champion; go back to one of: {earlier}"
            )
        target = state.version(to or champions[-2])
        verified_folder(workspace, target, state.client)
        decision = RollbackDecision(policy, str(target.version), str(champion.version), reason)
        remaining = champions[: champions.index(decision.champion) + 1]
        tags = [(policy, decision.replaced, ROLLED_BACK_TAG, reason[:REASON_LIMIT])]
        entry = _champion_entry(state, remaining, decision, version_tags=tags)
        return replace(decision, report=commit(state, entry))


def _champion_entry(
    state: ReleaseState,
    champions: Sequence[str],
    decision: PromotionDecision | RollbackDecision,
    *,
    action: str = "",
    version_tags: Sequence[tuple[str, str, str, str | None]] = (),
    model_tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The entry by which the last of ``champions``, and its reward model, become champion.

    That version is no longer marked as rolled back or declined. The action is the decision's unless
    it is given.
    """
    policy, reward_model, champion = state.config.policy, state.config.reward_model, champions[-1]
    champions = [*(number for number in champions[:-1] if number != champion), champion]
    previous = champions[-2] if len(champions) > 1 else None
    moves = [(policy, PREVIOUS, previous), (policy, CHAMPION, champion)]
    tags = state.version(champion).tags
    marks = [tag for tag in (ROLLED_BACK_TAG, DECLINED_TAG) if tag in tags]
    cleared = [(policy, champion, tag, None) for tag in marks]
    if (reward := tags.get(REWARD_VERSION_TAG)) is not None:
        earlier = None if previous is None else state.version(previous).tags.get(REWARD_VERSION_TAG)
        moves.append((reward_model, PREVIOUS, None if earlier == reward else earlier))
        moves.append((reward_model, CHAMPION, reward))
    return new_entry(
        policy,
        action or decision.action,
        decision.reason,
        moves=moves,
        version_tags=[*version_tags, *cleared],
        champions=champions,
        decision=decision,
        model_tags=model_tags,
    )


def gate_conditions(workspace: Path) -> dict[str, Sequence[Condition]]:
    """The conditions of each gate of ``workspace``, by its settings.

    The data gate has none, but limits. Gates that the workspace does without are left out.
    """
    params = load_params(workspace)
    names = [name for name in GATES if f"gate-{name}" not in params.left_out]
    return {name: getattr(params.gates, name, None) or () for name in names}


def short_conditions(gates: Mapping[str, Sequence[Condition]]) -> dict[str, list[dict[str, Any]]]:
    """Conditions by gate as JSON, without reasons, defaults, and gates that have none."""
    short = {}
    for name, conditions in gates.items():
        if conditions:
            short[name] = [
                row.model_dump(mode="json", exclude={"why"}, exclude_defaults=True)
                for row in conditions
            ]
    return short


def promotion_obstacle(
    version: ModelVersion, required: Mapping[str, Sequence[Condition]] | None = None
) -> str:
    """Why the record of a version forbids its promotion without force; empty if it does not.

    Args:
        required: The conditions by gate that it must have passed, None for whatever its gates
            required.
    """
    number, tags = f"version {version.version}", version.tags
    if tags.get(COMPLETE_TAG) != "true":
        return f"{number} is incomplete: its registration was interrupted"
    if tags.get(GATES_TAG) != GATES_PASSED:
        because = tag_line(tags, UNGATED_TAG) or "no record that its gates passed"
        return f"{number} is ungated ({because})"
    if ROLLED_BACK_TAG in tags:
        return f"{number} was rolled back ({tag_line(tags, ROLLED_BACK_TAG)})"
    if DECLINED_TAG in tags:
        return f"{number} was {tag_line(tags, DECLINED_TAG)}"
    if required is None:
        return ""
    if CONDITIONS_TAG not in tags:
        return f"{number} has no record of its gates' conditions; `rlhf run` registers it again"
    passed: dict[str, tuple[Condition, ...]] = {}
    try:
        for name, rows in json.loads(tags[CONDITIONS_TAG]).items():
            passed[name] = tuple(Condition(**fields, why="") for fields in rows)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return f"the conditions of {number} cannot be read; `rlhf run` registers it again"
    weaker = []
    for name, conditions in required.items():
        if missing := weaker_conditions(passed.get(name, ()), conditions):
            weaker.append(f"gates.{name} does not require {', '.join(missing)}")
    return f"{number} has passed weaker gates: {'; '.join(weaker)}" if weaker else ""
