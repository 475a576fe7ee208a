"""The language of rows, by the first thousand characters of their content (py3langid: naive Bayes over bytes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from rlhf_core.data.row_counts import RowFinding
from rlhf_core.data.validation.set_rules.set_rows import SetRows
from rlhf_core.errors import ConfigError

RULE = "expected_language"
CHARACTERS = 1000
# Shorter texts say too little: of one-word texts most are taken for the wrong language.
FEWEST_CHARACTERS = 40
VARIANTS = {"wuu": "zh", "yue": "zh"}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Languages:
    """Rows of another language than expected, and by kind how many rows are of each language."""

    breaches: list[RowFinding]
    counts: dict[str, Counter[str]]


def languages(rows: SetRows, kinds: Iterable[str], expected: Collection[str]) -> Languages:
    """Identify the language of every row of ``kinds``; texts below 40 characters count as unknown and pass.

    Raises:
        ConfigError: py3langid is not installed, or it does not know a language of ``expected``.
    """
    identifier = _identifier(expected)
    result = Languages([], {})
    for kind in kinds:
        counts = result.counts.setdefault(kind, Counter())
        for row in rows.of(kind):
            text = row.text[:CHARACTERS]
            language = UNKNOWN
            if len(text) >= FEWEST_CHARACTERS:
                name = str(identifier.classify(text)[0])
                language = VARIANTS.get(name, name)
            counts[language] += 1
            if language != UNKNOWN and language not in expected:
                result.breaches.append(
                    RowFinding(
                        RULE,
                        kind,
                        f"looks like language {language}",
                        number=row.number,
                        other=", ".join(sorted(expected)),
                    )
                )
    return result


def _identifier(expected: Collection[str]) -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ConfigError(
            "validate.languages needs py3langid: pip install 'rlhf-pipeline[language]', or leave the list empty"
        ) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    unknown = sorted(set(expected) - set(identifier.labels))
    if unknown:
        raise ConfigError(
            f"validate.languages: {unknown[0]} is no language that is told apart; known are "
            f"{', '.join(sorted(identifier.labels))}"
        )
    return identifier
