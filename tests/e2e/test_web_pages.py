"""The pages of Prefect and MLflow after a smoke run, as a browser shows them: names, bounds,
verdict, addresses.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_chromium
from commands import SmokeRun, command_environment

from flows.pipeline.artifacts import artifact_key
from rlhf_core.gates import GateDecision
from rlhf_core.storage.files import read_json
from rlhf_core.tracking.pipeline_run import MODEL_TRAINING, run_page

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.services,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
START_SECONDS = 300
ROWS_OF_A_PAGE = 10  # of a table in Prefect's second UI
ADDRESS = re.compile(r"(?:(Prefect|MLflow):)? +(runs|schedules|models) (http://\S+)$")
RUN_NAME = re.compile(r"workspace · smoke · 2\d{3}-\d\d-\d\d \d\d:\d\d:\d\d")


@dataclass(frozen=True)
class ServedWorkspace:
    """A workspace with a finished smoke run under ``rlhf up``, and the addresses that it printed,
    by their labels.
    """

    folder: Path
    made_in: Path  # the workspace whose run it shows
    addresses: dict[tuple[str, str], str]
    verdict: str

    @property
    def prefect(self) -> str:
        return self.addresses["Prefect", "runs"].removesuffix("/runs")

    @property
    def mlflow(self) -> str:
        return self.addresses["MLflow", "runs"].partition("/#/")[0]

    def artifact(self, *key: str) -> dict[str, Any]:
        """Return an artifact of the run from the API of the Prefect server."""
        query = json.dumps(
            {"artifacts": {"key": {"any_": [artifact_key(self.made_in, *key)]}}}
        ).encode()
        request = urllib.request.Request(
            f"{self.prefect}/api/artifacts/filter", query, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            (artifact,) = json.loads(answer.read())
        return dict(artifact)

    def mlflow_run(self) -> tuple[str, str, str]:
        """Return experiment, id and name of the pipeline run."""
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{self.folder / 'mlflow.db'}")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        (run,) = client.search_runs(experiments, "tags.`rlhf.pipeline` = 'true'")
        return run.info.experiment_id, run.info.run_id, run.info.run_name


@pytest.fixture(scope="module")
def served(smoke: SmokeRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedWorkspace]:
    folder = tmp_path_factory.mktemp("served") / "copy"
    shutil.copytree(smoke.workspace, folder, symlinks=True, ignore=shutil.ignore_patterns("tmp"))
    output = folder.parent / "up.log"
    with output.open("wb") as log:
        command = ["rlhf", "up", "--workspace", str(folder)]
        process = subprocess.Popen(
            command, env=command_environment(), stdout=log, stderr=log, cwd=folder
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "Ctrl-C" not in output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        (verdict,) = re.findall(r"^verdict +(.+)$", smoke.completed.stdout, flags=re.MULTILINE)
        yield ServedWorkspace(
            folder, smoke.workspace, printed_addresses(output.read_text()), verdict
        )
    finally:
        process.terminate()
        process.wait(120)


def headline(served: ServedWorkspace) -> str:
    return served.verdict[:1].upper() + served.verdict[1:]


def printed_addresses(output: str) -> dict[tuple[str, str], str]:
    addresses, server = {}, ""
    for line in output.splitlines():
        if match := ADDRESS.search(line):
            server = match.group(1) or server
            addresses[server, match.group(2)] = match.group(3)
    return addresses


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    opened = Browser(CHROMIUM, tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("server", "label", "expected"),
    [
        ("Prefect", "runs", ["rlhf-pipeline", "workspace · smoke · "]),
        ("Prefect", "schedules", ["pipeline-", "gpu-job", "promotion"]),
        ("MLflow", "runs", ["workspace · smoke · "]),
        ("MLflow", "models", ["rlhf-policy-smoke", "rlhf-reward-model-smoke"]),
    ],
)
def test_every_printed_address_opens_its_page(
    served: ServedWorkspace, browser: Browser, server: str, label: str, expected: list[str]
) -> None:
    assert len(served.addresses) == 4
    text = browser.open(served.addresses[server, label], *expected)
    assert "Judges" not in text, "MLflow opens as generative AI, not as model training"


@pytest.mark.parametrize("ui", ["", "/v2"])
@pytest.mark.parametrize("gate", ["data", "sft", "reward", "policy"])
def test_the_table_of_a_gate_keeps_the_signs_of_its_bounds(
    served: ServedWorkspace, browser: Browser, gate: str, ui: str
) -> None:
    decision = GateDecision.of(gate, read_json(served.folder / "gates" / f"{gate}.json"))
    rows = decision.failures_first[:ROWS_OF_A_PAGE]
    artifact = served.artifact("gate", gate)
    text = browser.open(
        f"{served.prefect}{ui}/artifacts/artifact/{artifact['id']}", rows[0].metric, rows[-1].why
    )
    cells = [cell.strip() for cell in re.split(r"[\t\n]", text)]
    assert all(row.required in cells and row.required[0] in "≥≤" for row in rows)
    assert not [cell for cell in cells if re.match(r"[=<>] *[\d.]|&\w+;|\\\\", cell)]


@pytest.mark.parametrize("ui", ["", "/v2"])
def test_the_prefect_run_has_its_name_tags_and_verdict(
    served: ServedWorkspace, browser: Browser, ui: str
) -> None:
    artifact = served.artifact("verdict")
    text = browser.open(
        f"{served.prefect}{ui}/runs/flow-run/{artifact['flow_run_id']}",
        "workspace · smoke · ",
        "\nsmoke\n",
        "sft",
    )
    assert RUN_NAME.search(text)
    page = f"{served.prefect}{ui}/artifacts/artifact/{artifact['id']}"
    text = browser.open(page, headline(served), "95 % interval", "rlhf chat")
    assert not [markup for markup in ("**", "|", "`", "&gt;") if markup in text]


def run_link(served: ServedWorkspace, *run: str) -> str:
    return f"{served.mlflow}/{run_page(*run)}"


def test_the_mlflow_run_and_what_it_registered_say_the_verdict(
    served: ServedWorkspace, browser: Browser
) -> None:
    experiment, run, name = served.mlflow_run()
    assert RUN_NAME.fullmatch(name)
    browser.open(
        run_link(served, experiment, run), name, headline(served), "95 % interval", "Registered: "
    )
    latest = f"verdict on the policy is: {served.verdict}"
    browser.open(
        f"{served.mlflow}/#/models/rlhf-policy-smoke{MODEL_TRAINING}",
        "The policy. Its version @champion",
        latest,
    )
    for model in ("rlhf-policy-smoke", "rlhf-reward-model-smoke"):
        browser.open(
            f"{served.mlflow}/#/models/{model}/versions/1{MODEL_TRAINING}",
            f"Registered by the run {name}",
            headline(served),
        )


def test_the_description_of_the_run_links_to_its_report(
    served: ServedWorkspace, browser: Browser
) -> None:
    experiment, run, _ = served.mlflow_run()
    browser.open(run_link(served, experiment, run), headline(served), "release.html")
    anchors = "[...document.querySelectorAll('a')].filter(a => a.innerText == 'release.html').map(a => a.href)"
    assert browser.evaluate(anchors) == [run_link(served, experiment, run, "release.html")]
    browser.open(
        run_link(served, experiment, run, "release.html"), "release.html", "params.yaml", "dvc.lock"
    )
