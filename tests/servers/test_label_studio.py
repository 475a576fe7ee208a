"""Pairs for annotators in a real Label Studio: our tasks and configuration in, its export back.

It needs an environment of its own (``pip install label-studio``); RLHF_LABEL_STUDIO names its program.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_chromium
from integration.flow_toys import rlhf, wait_until
from servers.label_studio import ACCOUNT, LabelStudio, find_label_studio, label_studio

PROGRAM = find_label_studio()
pytestmark = [
    pytest.mark.servers,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PROGRAM is None, reason="Label Studio is not installed; see RLHF_LABEL_STUDIO in this file"),
]
ANSWERS = ("left", "right", "tie", "skipped")
SIGN_IN = """
document.querySelector("input[name=email]").value = {email};
document.querySelector("input[name=password]").value = {password};
document.querySelector("form").submit();
"""
# The element that shows a text: below others with the same text, and right of the list of tasks.
SHOWS = """[...document.querySelectorAll("*")].filter(e => e.children.length == 0 && e.textContent.trim() === {text}
    && e.getBoundingClientRect().x > 220).pop()"""
TIE = """[...document.querySelectorAll("label")].find(e => e.innerText.startsWith("tie"))"""
SUBMIT = """[...document.querySelectorAll("button")].find(e => e.innerText.trim() === "Submit")"""
CENTRE = """(() => {{ const e = {element}; if (!e) return null; const r = e.getBoundingClientRect();
    return [r.x + r.width / 2, r.y + r.height / 2]; }})()"""

HAS_ANSWER = "Htx.annotationStore.selected.serializeAnnotation().length > 0"


@dataclass(frozen=True)
class Project:
    """A project with the tasks of an export."""

    server: LabelStudio
    number: int
    tasks: list[dict[str, Any]]

    def annotate(self, task: dict[str, Any], answer: str) -> None:
        """Store what the editor stores for an answer."""
        if answer == "tie":
            part = {"from_name": "tie", "to_name": "prompt", "type": "choices", "value": {"choices": ["tie"]}}
        else:
            part = {"from_name": "choice", "to_name": "choice", "type": "pairwise", "value": {"selected": answer}}
        skipped = answer == "skipped"
        body = {"result": [] if skipped else [part], "was_cancelled": skipped}
        self.server.call("POST", f"tasks/{task['id']}/annotations/", body)

    def export(self, file: Path) -> list[dict[str, Any]]:
        """Write the project's export as JSON into ``file``, tasks without annotations too, and return it."""
        path = f"projects/{self.number}/export?exportType=JSON&download_all_tasks=true"
        exported: list[dict[str, Any]] = self.server.call("GET", path)
        file.write_text(json.dumps(exported))
        return exported


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
    imported.sort(key=lambda task: task["id"])
    assert [task["data"] for task in imported] == [task["data"] for task in tasks]
    return Project(server, number, imported)


@pytest.fixture
def editor(server: LabelStudio, tmp_path: Path) -> Iterator[Browser]:
    """A browser in which the annotator has signed in."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium is installed")
    profile = tmp_path / "browser"
    profile.mkdir()
    browser = Browser(executable, profile, height=1100)
    try:
        browser.open(f"{server.url}/user/login/", "Log in")
        browser.evaluate(SIGN_IN.format(email=json.dumps(ACCOUNT), password=json.dumps(server.password)))
        wait_until(lambda: "/user/login" not in browser.evaluate("location.pathname"), 300, "sign-in")
        yield browser
    finally:
        browser.close()


def click(browser: Browser, element: str) -> None:
    """Click the middle of an element as soon as the page has it."""
    centre: list[tuple[float, float]] = []

    def is_there() -> bool:
        centre[:] = filter(None, [browser.evaluate(CENTRE.format(element=element))])
        return bool(centre)

    wait_until(is_there, 300, element)
    ((x, y),) = centre
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def choose(browser: Browser, element: str) -> None:
    """Click an answer until the editor has it: while the editor still draws its page, clicks are lost."""

    def is_chosen() -> bool:
        click(browser, element)
        for _ in range(20):
            if browser.evaluate(HAS_ANSWER):
                return True
            time.sleep(0.25)
        return False

    wait_until(is_chosen, 300, "answer in the editor")


def answers(workspace: Path) -> dict[str, str]:
    """The choice by pair that the workspace keeps."""
    (file,) = (workspace / "data/annotations/exports").glob("*.answers.jsonl")
    return {row["pair"]: row["choice"] for row in map(json.loads, file.read_text().splitlines())}


def test_answers_come_back_by_the_interface(project: Project, smoke_copy: Path, tmp_path: Path) -> None:
    for task, answer in zip(project.tasks, ANSWERS, strict=False):
        project.annotate(task, answer)
    project.export(tmp_path / "project.json")
    ended = rlhf("annotate", "import", str(tmp_path / "project.json"), "--json", cwd=smoke_copy)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (result,) = json.loads(ended.stdout)["results"]
    ((who, number),) = result["answered"].items()
    assert re.fullmatch(r"account \d+", who) and (number, result["ties"]) == (3, 1)
    pairs = [task["data"]["pair_id"] for task in project.tasks[:3]]
    assert answers(smoke_copy) == dict(zip(pairs, ("1", "2", "tie"), strict=True))


def test_answers_given_in_the_editor_come_back(
    project: Project, editor: Browser, smoke_copy: Path, tmp_path: Path
) -> None:
    for task, answer in zip(project.tasks, ("left", "right", "tie"), strict=False):
        editor.open(f"{project.server.url}/projects/{project.number}/data?task={task['id']}", "Submit")
        reply = task["data"]["reply_2" if answer == "right" else "reply_1"]
        choose(editor, TIE if answer == "tie" else SHOWS.format(text=json.dumps(reply)))
        click(editor, SUBMIT)
        path = f"tasks/{task['id']}/"
        wait_until(lambda path=path: project.server.call("GET", path)["annotations"], 300, "stored answer")
    project.export(tmp_path / "project.json")
    ended = rlhf("annotate", "import", str(tmp_path / "project.json"), cwd=smoke_copy)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pairs = [task["data"]["pair_id"] for task in project.tasks[:3]]
    assert answers(smoke_copy) == dict(zip(pairs, ("1", "2", "tie"), strict=True))
