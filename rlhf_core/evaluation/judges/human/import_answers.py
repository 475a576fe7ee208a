"""Read filled forms into a workspace: agreement, the human win rate, and preference pairs for the next round."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.config.data import CollectConfig
from rlhf_core.config.loading import load_section
from rlhf_core.data.collection.sources import annotation_sources
from rlhf_core.data.inspection.convert import record_of
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import Comparison, compare_outcomes
from rlhf_core.evaluation.judges.human.agreement import Kappa, cohen_kappas, fleiss_kappa
from rlhf_core.evaluation.judges.human.answers import Answer, FilledForm, read_form
from rlhf_core.evaluation.judges.human.pairs import EXPORTS, AnnotationExport, AnnotationPair
from rlhf_core.evaluation.judges.human.votes import Votes, count_votes, without_repeats
from rlhf_core.storage.files import LockFile, atomic_write_json, atomic_write_lines, split_json_lines

ANNOTATIONS = Path("data") / "annotations"
LOCK = Path(".rlhf") / "annotations.lock"
BOOTSTRAP = 2000


@dataclass(frozen=True)
class AnnotationResult:
    """What all answers to an export say so far.

    Attributes:
        export: Its name.
        pairs: How many pairs it has.
        answered: By annotator, how many pairs count.
        undecided: Pairs with answers of which none leads.
        ties: Pairs that tie by the majority.
        cohen: Cohen's kappa of every two annotators.
        fleiss: Fleiss' kappa of three or more.
        control: The policy against SFT on the control; None before it is answered.
        bad_cases: The same on the bad cases, which were chosen against the policy.
        preferences: How many preference pairs were written.
        file: Where.
        collected: Whether ``collect.annotations`` names that file.
    """

    export: str
    pairs: int
    answered: dict[str, int]
    undecided: int
    ties: int
    cohen: list[Kappa]
    fleiss: Kappa | None
    control: Comparison | None
    bad_cases: Comparison | None
    preferences: int
    file: str
    collected: bool


@dataclass(frozen=True)
class AnswerImport:
    """The result of each export that the files answer, and one line for each problem in them."""

    results: list[AnnotationResult]
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self)


def import_answers(
    workspace: Path, files: Sequence[Path], annotator: str | None = None, replace: bool = False
) -> AnswerImport:
    """Add the answers in ``files`` to those of earlier imports, and write what all of them say.

    ``data/annotations/exports/NAME.answers.jsonl`` keeps every answer, ``NAME.result.json`` the result, and
    ``data/annotations/NAME.jsonl`` the preference pairs, which the next collect reads. Importing a file again changes
    nothing.

    Args:
        workspace: The workspace that the pairs were exported from.
        files: Filled forms.
        annotator: Who filled them, where the files do not say it.
        replace: Whether earlier answers of the same annotators to the same export are taken back.

    Raises:
        DataError: A file cannot be read, or no line of it answers a pair of this workspace. Nothing is written then.
    """
    forms = [read_form(file, annotator) for file in files]
    if annotator is None:
        _require_distinct_names(forms)
    problems = [line for form in forms for line in form.problems()]
    by_export: dict[str, list[Answer]] = defaultdict(list)
    exports: dict[str, AnnotationExport] = {}
    for form in forms:
        for answer in form.answers:
            by_export[answer.pair.partition("-")[0]].append(answer)
        problems += _form_lines(form)
    for name in by_export:
        exports[name] = AnnotationExport.load_key(workspace, name)
        known = {pair.id for pair in exports[name].pairs}
        unknown = sorted({answer.pair for answer in by_export[name]} - known)
        if unknown:
            raise DataError(f"{unknown[0]} is no pair of the export {name}: an id was changed; {len(unknown)} in all")
    if not by_export:
        listed = ", ".join(str(file) for file in files)
        raise DataError(f"no pair is answered in {listed}; write 1, 2 or tie into the column choice")
    results = []
    with LockFile(workspace / LOCK) as lock:
        lock.acquire()  # another import must not read before this one has written
        for name, answers in sorted(by_export.items()):
            stored = _stored_answers(workspace, name)
            if replace:
                stored = [old for old in stored if old.annotator not in {answer.annotator for answer in answers}]
            everything = without_repeats([*stored, *answers])
            votes = count_votes(everything)
            problems += votes.contradiction_lines()
            results.append(_write(workspace, exports[name], everything, votes))
    return AnswerImport(results, problems)


def _require_distinct_names(forms: Sequence[FilledForm]) -> None:
    """Refuse files of one name, which say nothing of who filled them, with different answers.

    They are probably of two people, whose answers would count as contradictions of one.
    """
    by_name: dict[str, list[tuple[Path, dict[str, str]]]] = defaultdict(list)
    for form in forms:
        name = form.path.stem
        choices = {answer.pair: answer.choice for answer in form.answers if answer.annotator == name}
        for path, earlier in by_name[name]:
            if any(earlier.get(pair, choice) != choice for pair, choice in choices.items()) and path != form.path:
                raise DataError(
                    f"{path} and {form.path} answer the same pairs differently, and both would be of {name!r}; rename "
                    "them after who filled them, or import the right one alone"
                )
        by_name[name].append((form.path, choices))


def _form_lines(form: FilledForm) -> list[str]:
    """What is worth saying of a form whose lines can all be read."""
    lines = []
    if form.unanswered:
        lines.append(f"{form.path.name}: {form.unanswered} not answered yet, {len(form.answers)} answered")
    repeated = len(form.answers) - len(without_repeats(form.answers))
    if repeated:
        lines.append(f"{form.path.name}: {repeated} given twice in the same way, counted once")
    return lines


def _stored_answers(workspace: Path, name: str) -> list[Answer]:
    path = workspace / EXPORTS / f"{name}.answers.jsonl"
    if not path.is_file():
        return []
    try:
        return [Answer(**json.loads(line)) for line in split_json_lines(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); restore it from a copy, it holds people's answers") from error


def _write(workspace: Path, export: AnnotationExport, answers: list[Answer], votes: Votes) -> AnnotationResult:
    majorities = {pair.id: votes.majority(pair.id) for pair in export.pairs}
    rows = [
        _preference(pair, choice, export.name)
        for pair in export.pairs
        if (choice := majorities[pair.id]) is not None and choice != "tie"
    ]
    file = ANNOTATIONS / f"{export.name}.jsonl"
    atomic_write_lines(workspace / EXPORTS / f"{export.name}.answers.jsonl", [asdict(answer) for answer in answers])
    if rows:
        atomic_write_lines(workspace / file, rows)
    else:
        (workspace / file).unlink(missing_ok=True)
    result = AnnotationResult(
        export=export.name,
        pairs=len(export.pairs),
        answered={who: len(choices) for who, choices in sorted(votes.choices.items())},
        undecided=sum(majorities[pair.id] is None and bool(votes.of(pair.id)) for pair in export.pairs),
        ties=sum(choice == "tie" for choice in majorities.values()),
        cohen=cohen_kappas(votes.choices),
        fleiss=fleiss_kappa(votes.choices),
        control=_comparison([pair for pair in export.pairs if pair.control], votes, export.seed),
        bad_cases=_comparison([pair for pair in export.pairs if pair.bad_case], votes, export.seed),
        preferences=len(rows),
        file=str(file),
        collected=_is_collected(workspace, file),
    )
    atomic_write_json(workspace / EXPORTS / f"{export.name}.result.json", asdict(result))
    return result


def _is_collected(workspace: Path, file: Path) -> bool:
    sources = annotation_sources(load_section(workspace, "collect", CollectConfig).annotations, workspace)
    return (workspace / file).resolve() in {(workspace / source.path).resolve() for source in sources}


def _comparison(pairs: Sequence[AnnotationPair], votes: Votes, seed: int) -> Comparison | None:
    """The policy against SFT by the majority, where two choices lead a tie; None if nobody has answered."""
    answered = [pair for pair in pairs if votes.of(pair.id)]
    if not answered:
        return None
    return compare_outcomes([pair.outcome(votes.majority(pair.id) or "tie") for pair in answered], BOOTSTRAP, seed)


def _preference(pair: AnnotationPair, choice: str, export: str) -> dict[str, Any]:
    replies = (pair.reply_1, pair.reply_2) if choice == "1" else (pair.reply_2, pair.reply_1)
    row = {"prompt": pair.prompt, "chosen": replies[0], "rejected": replies[1], "margin": None}
    return record_of("preferences", row | {"category": pair.category, "source": f"annotations/{export}"})


def as_text(imported: AnswerImport) -> str:
    """Return a block of lines for each export, after the problems."""
    blocks = ["\n".join(imported.problems)] if imported.problems else []
    for result in imported.results:
        answered = ", ".join(f"{who} {count}" for who, count in result.answered.items())
        answered = answered or "nobody without contradiction"
        lines = [f"export {result.export}: {result.pairs} pairs; answered by {answered}"]
        kappas = [("Cohen's kappa", kappa) for kappa in result.cohen]
        kappas += [("Fleiss' kappa", result.fleiss)] if result.fleiss is not None else []
        for name, kappa in kappas:
            value = "not defined" if kappa.value is None else f"{kappa.value:.2f}"
            lines.append(f"  {name} of {', '.join(kappa.annotators)}: {value} on {kappa.pairs} pairs")
        for name, comparison in (("control", result.control), ("bad cases", result.bad_cases)):
            if comparison is not None:
                low, high = comparison.win_rate_low95, comparison.win_rate_high95
                lines.append(
                    f"  {name}: win rate of the policy {comparison.win_rate:.2f} (95 %: {low:.2f} to {high:.2f}) "
                    f"on {comparison.prompts} pairs"
                )
        collected = "the next run collects them" if result.collected else "add it to collect.annotations"
        lines.append(
            f"  {result.preferences} preference pairs in {result.file} ({result.ties} ties and {result.undecided} "
            f"undecided left out); {collected}"
        )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
