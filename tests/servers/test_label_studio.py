"""Pairs for annotators in a real Label Studio: our tasks and configuration in, its export back.

It needs an environment of its own (``pip install label-studio``); RLHF_LABEL_STUDIO names its program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from integration.flow_toys import rlhf
from servers.label_studio import ACCOUNT, LabelStudio, find_label_studio, label_studio

PROGRAM = find_label_studio()
pytestmark = [
    pytest.mark.servers,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PROGRAM is None, reason="Label Studio is not installed; see RLHF_LABEL_STUDIO in this file"),
]
ANSWERS = ("left", "right", "tie", "skipped")


@dataclass(frozen=True)
class Project:
    """A project with the tasks of an export."""

    server: LabelStudio
    number: int
    tasks: list[dict[str, Any]]

    def annotate(self, task: dict[str, Any], answer: str) -> None:
        """Store what the editor stores for an answer."""
        if answer == "tie":
            result = [{"from_name": "tie", "to_name": "prompt", "type": "choices", "value": {"choices": ["tie"]}}]
        else:
            result = [{"from_name": "choice", "to_name": "reply_1", "type": "pairwise", "value": {"selected": answer}}]
        body = {"result": [] if answer == "skipped" else result, "was_cancelled": answer == "skipped"}
        self.server.call("POST", f"tasks/{task['id']}/annotations/", body)

    def export(self) -> Any:
        """Return the project's export as JSON, unfinished tasks too."""
        return self.server.call("GET", f"projects/{self.number}/export?exportType=JSON&download_all_tasks=true")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabelStudio]:
    with label_studio(str(PROGRAM), tmp_path_factory.mktemp("label-studio")) as server:
        yield server


@pytest.fixture
def project(server: LabelStudio, smoke_copy: Path, tmp_path: Path) -> Project:
    """A project made of the files that `rlhf annotate export` wrote."""
    ended = rlhf("annotate", "export", str(tmp_path / "out"), cwd=smoke_copy)
    assert ended.returncode == 0, ended.stderr
    config = (tmp_path / "out/label_studio_config.xml").read_text()
    number = server.call("POST", "projects/", {"title": "replies", "label_config": config})["id"]
    tasks = json.loads((tmp_path / "out/label_studio_tasks.json").read_text())
    assert server.call("POST", f"projects/{number}/import", tasks)["task_count"] == len(tasks)
    imported = server.call("GET", f"tasks/?project={number}&page_size=1000")["tasks"]
    assert [task["data"] for task in sorted(imported, key=lambda task: task["id"])] == [task["data"] for task in tasks]
    return Project(server, number, imported)


def test_answers_given_in_label_studio_come_back(project: Project, smoke_copy: Path, tmp_path: Path) -> None:
    answered = {}
    for task, answer in zip(project.tasks, ANSWERS * 2, strict=False):
        project.annotate(task, answer)
        answered[task["data"]["pair_id"]] = answer
    exported = tmp_path / "project.json"
    exported.write_text(json.dumps(project.export()))
    ended = rlhf("annotate", "import", str(exported), "--json", cwd=smoke_copy)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(ended.stdout)
    answers = [json.loads(line) for path in (smoke_copy / "data/annotations/exports").rglob("answers*.jsonl")
               for line in path.read_text().splitlines()]  # fmt: skip
    print(answers)
    assert ACCOUNT
