"""Answers in filled forms: JSON lines, CSV, or Label Studio's JSON export."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from rlhf_core.config.data import CollectConfig
from rlhf_core.config.loading import load_section
from rlhf_core.data.collection.sources import annotation_sources
from rlhf_core.data.readers.json_records import JsonParser
from rlhf_core.data.readers.stream import stream_records
from rlhf_core.data.statistics import cluster_codes
from rlhf_core.data.text import shortened, writable
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import compare_outcomes
from rlhf_core.storage.files import (
    LockFile,
    atomic_write_json,
    atomic_write_lines,
    split_json_lines,
)
from rlhf_extras.annotation.human_pairs import EXPORTS, AnnotationExport, AnnotationPair
from rlhf_extras.data_files.convert import record_of

CHOICES = {"1": "1", "1.0": "1", "2": "2", "2.0": "2", "tie": "tie"}
SELECTED = {"left": "1", "right": "2"}
LISTED = 5
SHOWN = 60  # characters of a name or an id in a message
MOST_ANNOTATORS = 100  # every two of them are compared


@dataclass(frozen=True)
class Answer:
    """One annotator's choice (1, 2 or tie) on one pair."""

    pair: str
    annotator: str
    choice: str
    comment: str = ""


@dataclass
class FilledForm:
    """What a file holds: answers, how many questions are open, and unusable lines by reason."""

    path: Path
    answers: list[Answer] = field(default_factory=list)
    unanswered: int = 0
    unusable: dict[str, list[int]] = field(default_factory=dict)

    def add(self, line: int, pair: Any, annotator: str, choice: Any, comment: Any = "") -> None:
        """Add what a line says; a choice that is none of the three is never guessed."""
        text = "" if choice is None else str(choice).strip().lower()
        if not isinstance(pair, str) or not pair.strip():
            self.unusable.setdefault("no id", []).append(line)
        elif not text:
            self.unanswered += 1
        elif text not in CHOICES:
            self.unusable.setdefault("a choice other than 1, 2 or tie", []).append(line)
        else:
            note = comment.strip() if isinstance(comment, str) else ""
            self.answers.append(
                Answer(pair.strip(), _on_one_line(annotator), CHOICES[text], writable(note))
            )

    def problems(self) -> list[str]:
        """A line on each reason why lines are left out, on open questions, and on repeats."""
        name = _on_one_line(self.path.name)
        lines = []
        for reason, numbers in self.unusable.items():
            lines.append(
                f"{name}: {len(numbers)} left out for {reason} (line {_first_of(numbers)})"
            )
        if self.unanswered:
            lines.append(
                f"{name}: {self.unanswered} not answered yet, {len(self.answers)} answered"
            )
        repeated = len(self.answers) - len(without_repeats(self.answers))
        if repeated:
            lines.append(f"{name}: {repeated} given twice in the same way, counted once")
        return lines


def _on_one_line(name: str) -> str:
    return " ".join(writable(name).split())


def _first_of(items: Sequence[Any]) -> str:
    return f"{', '.join(map(str, items[:LISTED]))}{' …' if len(items) > LISTED else ''}"


def read_form(path: Path, annotator: str | None = None) -> FilledForm:
    """Read a filled form.

    Args:
        path: A ``.jsonl``, ``.csv`` or ``.json`` file (of Label Studio).
        annotator: Who filled it; by default its column ``annotator``, in Label Studio the account,
            else the file's name.

    Raises:
        DataError: The file cannot be read, or is no such form.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    form, annotator = FilledForm(path), _on_one_line(annotator or "")
    kind = path.suffix.lower()
    if kind == ".json":
        _read_label_studio(form, annotator)
        return form
    if kind not in (".jsonl", ".csv"):
        raise DataError(f"{path}: a filled form ends with .jsonl, .csv or .json (Label Studio)")
    is_table, records = kind == ".csv", list(stream_records(path))
    rows = [
        record.value for record in records if not record.problem and isinstance(record.value, dict)
    ]
    if (rows or not is_table) and not any({"id", "choice"} <= row.keys() for row in rows):
        raise DataError(f"{path} has no columns id and choice; keep those of the exported file")
    for record in records:
        row = record.value
        if is_table and not any(row.values() if isinstance(row, dict) else row):
            continue  # spreadsheets write rows without text
        if record.problem or not isinstance(row, dict):
            form.unusable.setdefault(record.problem if is_table else "no JSON object", []).append(
                record.position
            )
        else:
            who = annotator or str(row.get("annotator") or "").strip() or path.stem
            form.add(record.position, row.get("id"), who, row.get("choice"), row.get("comment"))
    return form


def _read_label_studio(form: FilledForm, annotator: str) -> None:
    """Read the export named JSON, with one list of annotations per task."""
    parser = JsonParser()
    try:
        tasks = parser.parse(form.path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{form.path} is not valid JSON ({error}); export it from Label Studio again"
        ) from error
    if problem := parser.problem_in(tasks):
        raise DataError(
            f"{form.path}: {shortened(problem, SHOWN)}; export it from Label Studio again"
        )
    if not isinstance(tasks, list) or not all(
        isinstance(task, dict) and isinstance(task.get("annotations"), list) for task in tasks
    ):
        raise DataError(
            f"{form.path} is no JSON export of Label Studio; export as JSON, not as JSON-MIN or CSV"
        )
    for number, task in enumerate(tasks, start=1):
        data = task.get("data")
        pair = data.get("pair_id") if isinstance(data, dict) else None
        done = [
            a for a in task["annotations"] if isinstance(a, dict) and not a.get("was_cancelled")
        ]
        if not done:
            form.add(number, pair, "", None)
        for annotation in done:
            who = _account(annotation.get("completed_by"))
            form.add(number, pair, annotator or who, _selected(annotation.get("result")))


def _account(completed_by: Any) -> str:
    """The e-mail address of an account, else its number, which is all that some exports have."""
    number = completed_by.get("id") if isinstance(completed_by, dict) else completed_by
    email = completed_by.get("email") if isinstance(completed_by, dict) else None
    return str(email or f"account {number}")


def _selected(result: Any) -> str | None:
    """The choice of an annotation: None without one, an unusable word if there are several."""
    choices: set[str] = set()
    for part in result if isinstance(result, list) else ():
        value = part.get("value") if isinstance(part, dict) else None
        if isinstance(value, dict):
            choices.update(SELECTED[side] for side in SELECTED if value.get("selected") == side)
            choices.update({"tie"} if value.get("choices") == ["tie"] else ())
    return choices.pop() if len(choices) == 1 else " and ".join(sorted(choices)) or None


def cohen_kappas(choices: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return Cohen's kappa of every two annotators who have answered a pair in common.

    Args:
        choices: By annotator, the choice on each pair.

    Returns:
        The ``annotators``, how many ``pairs`` all of them answered, and ``value``, 1 for full
        agreement, 0 for that of chance; None where it is not defined, as for a single choice.
    """
    from sklearn.metrics import cohen_kappa_score

    kappas = []
    for first, second in combinations(sorted(choices), 2):
        common = sorted(choices[first].keys() & choices[second].keys())
        if common:
            with warnings.catch_warnings():
                # Of one choice everywhere the kappa is not defined.
                warnings.simplefilter("ignore")
                by_first = [choices[first][pair] for pair in common]
                by_second = [choices[second][pair] for pair in common]
                value = float(cohen_kappa_score(by_first, by_second))
            known = value if math.isfinite(value) else None
            kappas.append({"annotators": [first, second], "value": known, "pairs": len(common)})
    return kappas


def fleiss_kappa(choices: Mapping[str, Mapping[str, str]]) -> dict[str, Any] | None:
    """Return Fleiss' kappa of three or more annotators on the pairs that all answered, else None.

    Fleiss, 1971, "Measuring nominal scale agreement among many raters": the share of agreeing pairs
    of annotators beyond that of chance, which is what the choices' shares over all pairs would
    give.
    """
    annotators, raters = sorted(choices), len(choices)
    common = sorted(set.intersection(*map(set, choices.values()))) if raters >= 3 else []
    if not common:
        return None
    agreeing_pairs = 0
    chosen: Counter[str] = Counter()
    for pair in common:
        counts = Counter(choices[who][pair] for who in annotators)
        agreeing_pairs += sum(n * (n - 1) for n in counts.values())
        chosen += counts
    answers = len(common) * raters
    agreeing = agreeing_pairs / (answers * (raters - 1))
    by_chance = sum((n / answers) ** 2 for n in chosen.values())
    value = (agreeing - by_chance) / (1 - by_chance) if by_chance < 1 else None
    return {"annotators": annotators, "value": value, "pairs": len(common)}


@dataclass(frozen=True)
class Votes:
    """The usable answers.

    Attributes:
        choices: By annotator, the choice on each pair.
        contradictions: By annotator, pairs with more than one choice, which count for nothing.
    """

    choices: dict[str, dict[str, str]]
    contradictions: dict[str, list[str]]

    def of(self, pair: str) -> list[str]:
        """The choices on a pair, by all annotators."""
        return [choices[pair] for choices in self.choices.values() if pair in choices]

    def majority(self, pair: str) -> str | None:
        """The choice that most annotators made; None where two lead, or nobody answered."""
        ranked = Counter(self.of(pair)).most_common(2)
        tied = len(ranked) == 2 and ranked[0][1] == ranked[1][1]
        return ranked[0][0] if ranked and not tied else None


def count_votes(answers: Sequence[Answer]) -> Votes:
    """Sort answers by annotator and pair."""
    options_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for answer in answers:
        options_of[answer.annotator, answer.pair].add(answer.choice)
    votes = Votes({}, {})
    for (annotator, pair), options in options_of.items():
        if len(options) == 1:
            votes.choices.setdefault(annotator, {})[pair] = next(iter(options))
        else:
            votes.contradictions.setdefault(annotator, []).append(pair)
    return votes


def without_repeats(answers: Sequence[Answer]) -> list[Answer]:
    """Return each (pair, annotator, choice) once, with the first comment that is not empty."""
    kept: dict[tuple[str, str, str], Answer] = {}
    for answer in answers:
        key = answer.pair, answer.annotator, answer.choice
        if key not in kept or not kept[key].comment:
            kept[key] = answer
    return list(kept.values())


ANNOTATIONS = Path("data") / "annotations"
LOCK = Path(".rlhf") / "annotations.lock"
BOOTSTRAP = 2000


def import_answers(
    workspace: Path, files: Sequence[Path], annotator: str | None = None, replace: bool = False
) -> dict[str, list[Any]]:
    """Add the answers in ``files`` to those of earlier imports, and write what all of them say.

    ``data/annotations/exports/NAME.answers.jsonl`` keeps every answer, ``NAME.result.json`` the
    result, and ``data/annotations/NAME.jsonl`` the preference pairs, which the next collect reads.
    Importing a file again changes nothing.

    Args:
        workspace: The workspace that the pairs were exported from.
        files: Filled forms.
        annotator: Who filled them, where the files do not say it.
        replace: Whether earlier answers of the same annotators to the same export are taken back.

    Returns:
        ``problems``, a line for each, and ``results`` of each export that the files answer: its
        name (``export``); how many ``pairs`` it has; ``answered``, how many count by annotator;
        ``undecided`` pairs with answers of which none leads, and ``ties`` by the majority; kappas
        (``cohen``, ``fleiss``); the policy against SFT on the ``control``, None before it is
        answered, and on the ``bad_cases``, which were chosen against the policy; how many
        ``preferences`` were written into which ``file``, and whether ``collect.annotations`` names
        it (``collected``).

    Raises:
        DataError: A file cannot be read, no line of it answers a pair of this workspace, or an
            export has answers of more than :data:`MOST_ANNOTATORS`. Nothing is written then.
    """
    forms = [read_form(file, annotator) for file in files]
    if annotator is None:
        _require_distinct_names(forms)
    problems: list[str] = []
    by_export: dict[str, list[Answer]] = defaultdict(list)
    exports: dict[str, AnnotationExport] = {}
    for form in forms:
        problems += form.problems()
        for answer in form.answers:
            by_export[answer.pair.partition("-")[0]].append(answer)
    for name, answers in by_export.items():
        exports[name] = AnnotationExport.load_key(workspace, name)
        known = {pair.id for pair in exports[name].pairs}
        unknown = sorted({answer.pair for answer in answers} - known)
        if unknown:
            raise DataError(
                f"{shortened(unknown[0], SHOWN)!r} is no pair of the export {name}: an id was changed; {len(unknown)} "
                "in all"
            )
    if not by_export:
        listed = ", ".join(str(file) for file in files)
        raise DataError(
            f"no pair is answered in {listed}; write 1, 2 or tie into the column choice"
        )
    everything: dict[str, list[Answer]] = {}
    results = []
    with LockFile(workspace / LOCK) as lock:
        lock.acquire()  # another import must not read before this one has written
        for name, answers in sorted(by_export.items()):
            stored = _stored_answers(workspace, name)
            if replace:
                again = {answer.annotator for answer in answers}
                stored = [old for old in stored if old.annotator not in again]
            everything[name] = without_repeats([*stored, *answers])
            annotators = len({answer.annotator for answer in everything[name]})
            if annotators > MOST_ANNOTATORS:
                raise DataError(
                    f"the export {name} has answers of {annotators} annotators, and at most {MOST_ANNOTATORS} can be "
                    "compared; is the column annotator right?"
                )
        for name, kept in everything.items():
            votes = count_votes(kept)
            for who, pairs in sorted(votes.contradictions.items()):
                problems.append(
                    f"{shortened(who, SHOWN)}: {len(pairs)} left out, answered in two ways "
                    f"({_first_of(sorted(pairs))}); import the right file with --replace"
                )
            results.append(_write(workspace, exports[name], kept, votes))
    return {"results": results, "problems": problems}


def _require_distinct_names(forms: Sequence[FilledForm]) -> None:
    """Refuse files of one name, which say nothing of who filled them, with different answers.

    They are probably of two people, whose answers would count as contradictions of one.
    """
    by_name: dict[str, list[tuple[Path, dict[str, str]]]] = defaultdict(list)
    for form in forms:
        name = _on_one_line(form.path.stem)
        choices = {}
        for answer in form.answers:
            if answer.annotator == name:
                choices[answer.pair] = answer.choice
        for path, earlier in by_name[name]:
            differs = any(earlier.get(pair, choice) != choice for pair, choice in choices.items())
            if differs and path != form.path:
                raise DataError(
                    f"{path} and {form.path} answer the same pairs differently, and both would be of {name!r}; rename "
                    "them after who filled them, or import the right one alone"
                )
        by_name[name].append((form.path, choices))


def _stored_answers(workspace: Path, name: str) -> list[Answer]:
    path = workspace / EXPORTS / f"{name}.answers.jsonl"
    if not path.is_file():
        return []
    try:
        return [
            Answer(**json.loads(line))
            for line in split_json_lines(path.read_text(encoding="utf-8"))
        ]
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error}); restore it from a copy, it holds people's answers"
        ) from error


def _write(
    workspace: Path, export: AnnotationExport, answers: list[Answer], votes: Votes
) -> dict[str, Any]:
    """Write all answers to an export so far, its preference pairs, and the result."""
    rows = []
    ties = undecided = 0
    for pair in export.pairs:
        choice = votes.majority(pair.id)
        if choice == "tie":
            ties += 1
        elif choice is not None:
            rows.append(_preference(pair, choice, export.name))
        elif votes.of(pair.id):
            undecided += 1
    file = ANNOTATIONS / f"{export.name}.jsonl"
    kept = workspace / EXPORTS / f"{export.name}.answers.jsonl"
    atomic_write_lines(kept, [asdict(answer) for answer in answers])
    if rows:
        atomic_write_lines(workspace / file, rows)
    else:
        (workspace / file).unlink(missing_ok=True)
    named = load_section(workspace, "collect", CollectConfig).annotations
    sources = annotation_sources(named, workspace)
    collected = {(workspace / source.path).resolve() for source in sources}
    control = [pair for pair in export.pairs if pair.control]
    bad_cases = [pair for pair in export.pairs if pair.bad_case]
    answered = {who: len(choices) for who, choices in sorted(votes.choices.items())}
    result = {
        "export": export.name,
        "pairs": len(export.pairs),
        "answered": answered,
        "undecided": undecided,
        "ties": ties,
        "cohen": cohen_kappas(votes.choices),
        "fleiss": fleiss_kappa(votes.choices),
        "control": _comparison(control, votes, export.seed),
        "bad_cases": _comparison(bad_cases, votes, export.seed),
        "preferences": len(rows),
        "file": str(file),
        "collected": (workspace / file).resolve() in collected,
    }
    atomic_write_json(workspace / EXPORTS / f"{export.name}.result.json", result)
    return result


def _comparison(
    pairs: Sequence[AnnotationPair], votes: Votes, seed: int
) -> dict[str, float] | None:
    """The policy against SFT by the majority; None if nobody has answered.

    Where two choices lead, that is a tie.
    """
    answered = [pair for pair in pairs if votes.of(pair.id)]
    if not answered:
        return None
    outcome = [pair.outcome(votes.majority(pair.id) or "tie") for pair in answered]
    return compare_outcomes(
        outcome, BOOTSTRAP, seed, clusters=cluster_codes([pair.cluster for pair in answered])
    )


def _preference(pair: AnnotationPair, choice: str, export: str) -> dict[str, Any]:
    replies = (pair.reply_1, pair.reply_2) if choice == "1" else (pair.reply_2, pair.reply_1)
    row = {"prompt": pair.prompt, "chosen": replies[0], "rejected": replies[1], "margin": None}
    return record_of(
        "preferences", row | {"category": pair.category, "source": f"annotations/{export}"}
    )


def as_text(imported: Mapping[str, Sequence[Any]]) -> str:
    """Return a block of lines for each export of :func:`import_answers`, after the problems."""
    blocks = ["\n".join(imported["problems"])] if imported["problems"] else []
    for result in imported["results"]:
        answered = ", ".join(
            f"{shortened(who, SHOWN)} {count}" for who, count in result["answered"].items()
        )
        answered = answered or "nobody without contradiction"
        lines = [f"export {result['export']}: {result['pairs']} pairs; answered by {answered}"]
        kappas = [("Cohen's kappa", kappa) for kappa in result["cohen"]]
        for name, kappa in [*kappas, ("Fleiss' kappa", result["fleiss"])]:
            if kappa is not None:
                value = "not defined" if kappa["value"] is None else f"{kappa['value']:z.2f}"
                people = ", ".join(shortened(who, SHOWN) for who in kappa["annotators"])
                lines.append(f"  {name} of {people}: {value} on {kappa['pairs']} pairs")
        for name, versus in (("control", result["control"]), ("bad cases", result["bad_cases"])):
            if versus is not None:
                low, high = versus["win_rate_low95"], versus["win_rate_high95"]
                lines.append(
                    f"  {name}: win rate of the policy {versus['win_rate']:.2f} (95 %: {low:.2f} to {high:.2f}) "
                    f"on {versus['prompts']} pairs about {versus['clusters']} different questions"
                )
        collected = (
            "the next run collects them" if result["collected"] else "add it to collect.annotations"
        )
        lines.append(
            f"  {result['preferences']} preference pairs in {result['file']} ({result['ties']} ties and "
            f"{result['undecided']} undecided left out); {collected}"
        )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
