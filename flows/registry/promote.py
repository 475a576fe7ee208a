"""Who becomes champion: promotion by match, approval by a person, rollback, and what stands against
a version.

A challenger is promoted only if every judge's lower 95 % bound clears the threshold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.registry.aliases import (
    CHALLENGER,
    CHAMPION,
    CONDITIONS_TAG,
    GATES_TAG,
    PREVIOUS,
    REWARD_VERSION_TAG,
    UNGATED_TAG,
    registry_errors,
)
from flows.registry.decisions import (
    REPORT_TAG,
    PromotionDecision,
    RollbackDecision,
    as_report,
    commit,
    move,
    new_entry,
    publish_decision,
    read_report,
    registry_session,
    utc_now,
    version_tag,
)
from flows.registry.evidence import gate_conditions, weaker_gates
from flows.registry.history import (
    APPROVE,
    DECLINE,
    REQUEST,
    WITHDRAW,
    ApprovalRequest,
    ReleaseState,
    version_words,
)
from flows.registry.match import PlayMatch, decided_by, make_attempt, play_match
from flows.registry.register import GATES_PASSED
from flows.registry.stored_models import COMPLETE_TAG, verified_folder
from flows.registry.workspace import OWNER_TAG, actor, ownership, printed_line
from rlhf_core.config.gates import Condition
from rlhf_core.errors import RlhfError
from rlhf_core.evaluation.promotion import non_inferiority_criteria, win_rate_criteria

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


ROLLED_BACK_TAG, DECLINED_TAG = "rolled_back", "declined"
REASON_LIMIT = 1000


def promote(
    workspace: Path,
    *,
    version: str | None = None,
    force_reason: str | None = None,
    dry_run: bool = False,
    approval: bool = False,
    play: PlayMatch = play_match,
) -> PromotionDecision:
    """Decide whether the challenger becomes ``@champion``, act on it, and keep the decision as an
    immutable report.

    The registered files must be the ones that the gates judged, and the version must have passed
    every gate. Only the workspace that owns the registered model promotes
    (:func:`flows.registry.workspace.ownership`). Where there was never a champion the challenger
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
            raise RlhfError(
                f"{config.policy} has no @{CHALLENGER}; `rlhf run` registers one once its gates pass"
            )
        champion = state.version_with(CHAMPION)
        decision = replace(
            _decide(state, challenger, champion, force_reason, play), dry_run=dry_run
        )
        entry: Mapping[str, Any] | None = None
        if approval or config.approval:
            request = state.request
            judged = (decision.challenger, decision.champion)
            is_open = (
                request is not None
                and request.is_open
                and (request.challenger, request.champion) == judged
            )
            if decision.promoted:
                decision = replace(
                    decision, promoted=False, awaiting_approval=True, unchanged=is_open
                )
                # A version that was named is the challenger from its request on.
                is_challenger = state.aliases.get(CHALLENGER) == decision.challenger
                moves = (
                    [] if is_challenger else [move(decision.model, CHALLENGER, decision.challenger)]
                )
                entry = new_entry(
                    config.policy,
                    REQUEST,
                    decision.reason,
                    moves=moves,
                    decision=decision,
                    model_tags=owner,
                )
            elif is_open and decision.match is not None:
                decision = replace(decision, unchanged=False)
                entry = new_entry(decision.model, WITHDRAW, decision.reason, decision=decision)
        elif decision.promoted and not dry_run:
            entry = _champion_entry(
                state, [*state.champions, decision.challenger], decision, model_tags=owner
            )
        if dry_run or decision.unchanged:
            return decision
        if entry is not None:
            return replace(decision, report=commit(state, entry))
        with registry_errors("record the decision; nothing has moved"):
            report = publish_decision(
                state.client, workspace, decision.challenger, as_report(decision)
            )
        return replace(decision, report=report)


def _required_reason(reason: str, otherwise: str) -> str:
    """The reason on one line; ``RlhfError`` with the text ``otherwise`` if it is empty."""
    line = printed_line(reason)
    if not line:
        raise RlhfError(otherwise)
    return line


def _decide(
    state: ReleaseState,
    challenger: ModelVersion,
    champion: ModelVersion | None,
    force_reason: str | None,
    play: PlayMatch,
) -> PromotionDecision:
    client, workspace, config = state.client, state.workspace, state.config
    decision = PromotionDecision(
        model=config.policy,
        challenger=str(challenger.version),
        champion=None if champion is None else str(champion.version),
        bar=config.promote_win_rate_low95,
        forced=force_reason,
    )
    if champion is not None and champion.version == challenger.version:
        return decision.refused("the challenger is the champion already", unchanged=True)
    if not_allowed := state.not_the_owner:
        return decision.refused(not_allowed, unchanged=True)
    folder = verified_folder(workspace, challenger, client)
    obstacle = promotion_obstacle(challenger, gate_conditions(workspace))
    if obstacle and force_reason is None:
        return decision.refused(
            f"{obstacle}; promote it with --force --reason TEXT", unchanged=True
        )
    if champion is None:
        removed = removed_champion(state)
        if removed and force_reason is None:  # without the alias it would be spared a match
            return decision.refused(removed, unchanged=True)
        reason = "; ".join(part for part in (obstacle, removed) if part) or "there was no champion"
        passed = True  # else it is forced
    else:
        try:
            champion_files = verified_folder(workspace, champion, client)
            number, question, match = make_attempt(
                *(client, workspace, config, challenger, champion),
                lambda prompt_set: play(workspace, champion_files, folder, prompt_set),
            )
            criteria = (
                *win_rate_criteria(
                    match, config.promote_win_rate_low95, config.error_budget, number
                ),
                *non_inferiority_criteria(match, config.non_inferiority),
            )
            decision = replace(
                decision, question=question, match=match, attempt=number, criteria=criteria
            )
            passed, reason = decided_by(match, config.promote_win_rate_low95, criteria)
        except RlhfError as error:
            if force_reason is None:
                raise
            passed, reason = False, f"no match: {error}"
        reason = "; ".join(part for part in (obstacle, reason) if part)
    if force_reason is not None:
        return decision.accepted(f"forced: {printed_line(force_reason)} (otherwise: {reason})")
    if passed:
        return decision.accepted(reason)
    said = {"question": decision.question, "bar": decision.bar, "reason": reason}
    known = read_report(workspace, challenger.tags.get(REPORT_TAG, ""))
    return decision.refused(
        reason, unchanged=all(known.get(key) == value for key, value in said.items())
    )


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
        declined = version_tag(planned.model, planned.challenger, DECLINED_TAG, approval)
        entry = new_entry(
            planned.model, DECLINE, approval, version_tags=[declined], decision=decision
        )
        return replace(decision, report=commit(state, entry))


def open_request(state: ReleaseState, version: str | None) -> ApprovalRequest:
    """The version that waits for approval.

    Args:
        version: The version that the person has looked at, None for the one that waits.

    Raises:
        RlhfError: No version waits, another one does, or the registry has changed since it was
            judged.
    """
    model, aliases, request = state.name, state.aliases, state.request
    if request is None:
        raise RlhfError(
            f"no version of {model} waits for approval: with registry.approval, `rlhf promote` requests it for a "
            "challenger that passes"
        )
    if version not in (None, request.challenger):
        waiting = f"version {request.challenger} does" if request.is_open else "none does"
        raise RlhfError(f"version {version} of {model} does not wait for approval; {waiting}")
    if not request.is_open:
        raise RlhfError(request.closed_because())
    for alias, judged in ((CHALLENGER, request.challenger), (CHAMPION, request.champion)):
        if aliases.get(alias) != judged:  # moved by something else than rlhf
            raise RlhfError(
                f"the {alias} of {model} is {version_words(aliases.get(alias))}, and was {version_words(judged)} when "
                f"version {request.challenger} was judged; `rlhf promote` judges the challenger"
            )
    return request


def _requested(state: ReleaseState, version: str | None) -> PromotionDecision:
    """The promotion that waits for approval, as far as the history holds it; the match is in the
    request's report.
    """
    request = open_request(state, version)
    kept = {field.name for field in fields(PromotionDecision)} - {
        "report",
        "match",
        "question",
        "criteria",
    }
    planned: dict[str, Any] = {
        name: value for name, value in request.entry["decision"].items() if name in kept
    }
    return replace(
        PromotionDecision(**planned), awaiting_approval=False, who=actor(), time=utc_now()
    )


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
        tags = [version_tag(policy, decision.replaced, ROLLED_BACK_TAG, reason[:REASON_LIMIT])]
        entry = _champion_entry(state, remaining, decision, version_tags=tags)
        return replace(decision, report=commit(state, entry))


def _champion_entry(
    state: ReleaseState,
    champions: Sequence[str],
    decision: PromotionDecision | RollbackDecision,
    *,
    action: str = "",
    version_tags: Sequence[Mapping[str, Any]] = (),
    model_tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Aliases of the policy and of its reward model, after the last of ``champions`` became
    champion.

    That version is no longer marked as rolled back or declined. The action is the decision's unless
    it is given.
    """
    policy, reward_model, champion = state.config.policy, state.config.reward_model, champions[-1]
    champions = [*(number for number in champions[:-1] if number != champion), champion]
    previous = champions[-2] if len(champions) > 1 else None
    moves = [move(policy, PREVIOUS, previous), move(policy, CHAMPION, champion)]
    tags = state.version(champion).tags
    cleared = [
        version_tag(policy, champion, tag, None)
        for tag in (ROLLED_BACK_TAG, DECLINED_TAG)
        if tag in tags
    ]
    if (reward := tags.get(REWARD_VERSION_TAG)) is not None:
        earlier = None if previous is None else state.version(previous).tags.get(REWARD_VERSION_TAG)
        moves += [move(reward_model, PREVIOUS, None if earlier == reward else earlier)]
        moves += [move(reward_model, CHAMPION, reward)]
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


def removed_champion(state: ReleaseState) -> str:
    """Why no challenger takes the free place of the champion; empty if there never was one, or
    there is one.
    """
    if state.champion is not None or state.recorded_champion is None:
        return ""
    last = next(reversed(state.champions), None)
    remedy = f"--version {last} --force --reason TEXT` restores version {last}"
    remedy = remedy if last is not None else "--force --reason TEXT` promotes without a match"
    return (
        f"version {state.recorded_champion} was champion, and @{CHAMPION} was removed by something else than rlhf, so "
        f"there is nothing to compare with; `rlhf promote {remedy}"
    )


def promotion_obstacle(
    version: ModelVersion, required: Mapping[str, Sequence[Condition]] | None = None
) -> str:
    """Why a version must not be promoted without force, by what is recorded of it; empty if nothing
    stands against.

    Args:
        required: The conditions by gate that it must have passed, None for whatever its gates
            required.
    """
    number, tags = f"version {version.version}", version.tags
    if tags.get(COMPLETE_TAG) != "true":
        return f"{number} is incomplete: its registration was interrupted"
    if tags.get(GATES_TAG) != GATES_PASSED:
        return f"{number} is ungated ({tags.get(UNGATED_TAG) or 'no record that its gates passed'})"
    if ROLLED_BACK_TAG in tags:
        return f"{number} was rolled back ({tags[ROLLED_BACK_TAG]})"
    if DECLINED_TAG in tags:
        return f"{number} was {tags[DECLINED_TAG]}"
    if required is None:
        return ""
    if CONDITIONS_TAG not in tags:
        return f"{number} has no record of its gates' conditions; `rlhf run` registers it again"
    try:
        weaker = weaker_gates(json.loads(tags[CONDITIONS_TAG]), required)
    except (ValueError, TypeError, AttributeError):
        return f"the conditions of {number} cannot be read; `rlhf run` registers it again"
    return f"{number} has passed weaker gates: {'; '.join(weaker)}" if weaker else ""
