"""The forms that annotators fill in: JSON lines, CSV, and tasks for Label Studio."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.evaluation.judges.human.pairs import AnnotationPair
from rlhf_core.storage.files import atomic_write_json, atomic_write_lines, atomic_write_text

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
    """Write ``pairs.jsonl``, ``pairs.csv``, ``label_studio_tasks.json`` and ``label_studio_config.xml``.

    They hold nothing about who wrote a reply, what chose the pair, or its category.
    """
    rows = [
        {
            "id": pair.id,
            "prompt": pair.prompt_text,
            "reply_1": pair.reply_1,
            "reply_2": pair.reply_2,
            "choice": "",
            "comment": "",
        }
        for pair in pairs
    ]
    jsonl, table = folder / "pairs.jsonl", folder / "pairs.csv"
    tasks, config = folder / "label_studio_tasks.json", folder / "label_studio_config.xml"
    atomic_write_lines(jsonl, rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in row.items()} for row in rows)
    atomic_write_text(table, "\ufeff" + text.getvalue())  # with the mark, spreadsheets read it as UTF-8
    texts = ("prompt", "reply_1", "reply_2")
    data = [{"pair_id": row["id"], **{name: row[name] for name in texts}} for row in rows]
    atomic_write_json(tasks, [{"data": values} for values in data])
    atomic_write_text(config, LABEL_STUDIO_CONFIG)
    return [jsonl, table, tasks, config]


def _no_formula(text: str) -> str:
    """A cell that a spreadsheet would take for a formula, as text. Of a filled form only id and choice are read."""
    return f"'{text}" if text.startswith(FORMULA) else text
