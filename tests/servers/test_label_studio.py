"""Pairs for annotators in a real Label Studio, on SQLite and with a token: our tasks in, its export
back.

It needs an environment of its own (``pip install label-studio``); RLHF_LABEL_STUDIO names its
program.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from background import wait_for_answer, wait_until
from browser import Browser, find_chromium
from integration.flow_toys import rlhf

from flows.prefect_server.services import free_port

ACCOUNT = "annotator@example.org"
START_SECONDS = (
    1500  # its first start migrates an empty database, which takes minutes on a busy machine
)
STOP_SECONDS = 60


def find_label_studio() -> str | None:
    """Return the program: what RLHF_LABEL_STUDIO names, in an environment of its own, else one on
    the path.
    """
    return os.environ.get("RLHF_LABEL_STUDIO") or shutil.which("label-studio")


@dataclass(frozen=True)
class LabelStudio:
    """A running server, and the account that annotates."""

    url: str
    token: str
    password: str

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return what the REST interface answers."""
        headers = {"Authorization": f"Token {self.token}"}
        answer = httpx.request(
            method, f"{self.url}/api/{path}", json=body, headers=headers, timeout=300
        )
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:2000]}"
        return answer.json()


@contextmanager
def label_studio(program: str, folder: Path) -> Iterator[LabelStudio]:
    """Run the server with its data in ``folder``."""
    port = free_port()
    server = LabelStudio(f"http://127.0.0.1:{port}", secrets.token_hex(20), secrets.token_hex(12))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment |= {
        "LABEL_STUDIO_BASE_DATA_DIR": str(folder),
        "LABEL_STUDIO_ENABLE_LEGACY_API_TOKEN": "true",
        "LABEL_STUDIO_USERNAME": ACCOUNT,
        "LABEL_STUDIO_PASSWORD": server.password,
        "LABEL_STUDIO_USER_TOKEN": server.token,
        "COLLECT_ANALYTICS": "false",
        "LATEST_VERSION_CHECK": "false",
        "SENTRY_DSN": "",
        "FRONTEND_SENTRY_DSN": "",
    }
    command = [
        program,
        "start",
        "--no-browser",
        "--internal-host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_for_answer(f"{server.url}/health", process, log, START_SECONDS)
        yield server
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, sent)
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    continue


PROGRAM = find_label_studio()
pytestmark = [
    pytest.mark.servers,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        PROGRAM is None, reason="Label Studio is not installed; see RLHF_LABEL_STUDIO in this file"
    ),
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
            part = {
                "from_name": "tie",
                "to_name": "prompt",
                "type": "choices",
                "value": {"choices": ["tie"]},
            }
        else:
            part = {
                "from_name": "choice",
                "to_name": "choice",
                "type": "pairwise",
                "value": {"selected": answer},
            }
        skipped = answer == "skipped"
        body = {"result": [] if skipped else [part], "was_cancelled": skipped}
        self.server.call("POST", f"tasks/{task['id']}/annotations/", body)

    def export(self, file: Path) -> list[dict[str, Any]]:
        """Write the project's export as JSON into ``file``, tasks without annotations too, and
        return it.
        """
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
        browser.evaluate(
            SIGN_IN.format(email=json.dumps(ACCOUNT), password=json.dumps(server.password))
        )
        wait_until(
            lambda: "/user/login" not in browser.evaluate("location.pathname"), 300, "sign-in"
        )
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
    """Click an answer until the editor has it: while the editor still draws its page, clicks are
    lost.
    """

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


def test_answers_come_back_by_the_interface(
    project: Project, smoke_copy: Path, tmp_path: Path
) -> None:
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
        editor.open(
            f"{project.server.url}/projects/{project.number}/data?task={task['id']}", "Submit"
        )
        reply = task["data"]["reply_2" if answer == "right" else "reply_1"]
        choose(editor, TIE if answer == "tie" else SHOWS.format(text=json.dumps(reply)))
        click(editor, SUBMIT)
        path = f"tasks/{task['id']}/"
        wait_until(
            lambda path=path: project.server.call("GET", path)["annotations"], 300, "stored answer"
        )
    project.export(tmp_path / "project.json")
    ended = rlhf("annotate", "import", str(tmp_path / "project.json"), cwd=smoke_copy)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pairs = [task["data"]["pair_id"] for task in project.tasks[:3]]
    assert answers(smoke_copy) == dict(zip(pairs, ("1", "2", "tie"), strict=True))
