"""New annotations beside `rlhf up` on lasting servers: the watch finds them, and its event starts a
whole round.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from background import wait_until
from commands import run
from integration.flow_toys import begin, environment, processes_of, rlhf
from servers.conftest import Servers
from servers.test_prefect import ask, login

from flows.registry.client import connect, experiment_id
from rlhf_core.data.schema import read_table

__all__ = ["login"]
pytestmark = [pytest.mark.servers, pytest.mark.timeout(3600)]
POLICY = "rlhf-policy-watched"
WATCH, PIPELINE = "rlhf-data-watch/data-watch-watched", "rlhf-pipeline/pipeline-watched"
# Every stage works, and none of them for long: what counts here is that a round happens, not how
# good its models are.
QUICK_SETTINGS = f"""
collect.world.demonstrations=1200 collect.world.preferences=1500 collect.world.pretrain=100
sft.steps=30 reward.steps=10 referee.steps=10 judge.steps=10
gates.reward=[{{"metric":"accuracy","at_least":0,"why":"any"}}]
gates.policy=[{{"metric":"kl","at_most":1000,"why":"any"}}]
critic.max_rollouts=1 ppo.iterations=2 ppo.batch_size=8 ppo.max_new_tokens=16
ppo.health.mode=report ppo.selection.every=1 ppo.selection.prompts=8 evaluate.prompts=16 evaluate.kl_samples=16
registry.policy={POLICY} registry.reward_model=rlhf-reward-model-watched tracking.experiment=watched
"""
QUICK = [word for setting in QUICK_SETTINGS.split() for word in ("--set", setting)]
ANNOTATION = '{"prompt": "How do I boil an egg?", "chosen": "Ten minutes in boiling water.", "rejected": "No."}\n'


@pytest.fixture
def shell(
    servers: Servers, mlflow_server: str, login: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """What a user's shell sets to use the servers; this process records there too."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    return {
        **login,
        **{
            name: value for name, value in servers.environment.items() if name.startswith("MLFLOW_")
        },
    }


@pytest.fixture
def watched(tmp_path: Path, shell: dict[str, str]) -> Iterator[Path]:
    """A workspace of the smoke profile in which `rlhf up` keeps workers and the deployments of
    prefect.yaml.
    """
    workspace = tmp_path / "watched"
    made = rlhf("init", str(workspace), "--profile", "smoke", *QUICK, cwd=tmp_path, **shell)
    assert made.returncode == 0, made.stdout + made.stderr
    lasting = begin("up", cwd=workspace, **shell)
    log = workspace / "out.log"
    try:
        wait_until(
            lambda: lasting.poll() is not None or "up: scheduled" in log.read_text(),
            900,
            "`rlhf up`",
        )
        assert lasting.poll() is None, log.read_text()
        yield workspace
    finally:
        lasting.send_signal(signal.SIGTERM)
        lasting.wait(120)
    assert processes_of(workspace) == []


def start(deployment: str, workspace: Path, shell: dict[str, str]) -> None:
    """Run a deployment as docs/operations.md says, and wait for its end."""
    prefect = (
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "deployment",
        "run",
        deployment,
        "--watch",
    )
    ended = run(*prefect, cwd=workspace, timeout=900, **environment(**shell))
    assert ended.returncode == 0, ended.stdout + ended.stderr


def flow_runs(shell: dict[str, str], deployment: str) -> list[dict[str, Any]]:
    """The runs of a deployment that have started, the newest first."""
    name = deployment.partition("/")[2]
    body = {
        "deployments": {"name": {"any_": [name]}},
        "flow_runs": {"start_time": {"is_null_": False}},
    }
    return ask(shell, "flow_runs/filter", {**body, "sort": "START_TIME_DESC"})


def records(workspace: Path) -> list[str]:
    """The ids of the runs that MLflow has of the workspace."""
    client = connect(workspace)
    return sorted(
        record.info.run_id for record in client.search_runs([experiment_id(client, workspace)])
    )


def test_new_annotations_start_a_round_that_ends_in_a_challenger(
    watched: Path, shell: dict[str, str]
) -> None:
    registered = rlhf("run", cwd=watched, timeout=1500, **shell)
    assert registered.returncode == 0, registered.stdout + registered.stderr
    client, before = connect(watched), records(watched)
    assert client.get_model_version_by_alias(POLICY, "champion").version == "1"

    start(WATCH, watched, shell)
    assert (
        flow_runs(shell, WATCH)[0]["state"]["message"] == "no new data"
        and flow_runs(shell, PIPELINE) == []
    )

    (watched / "data/annotations").mkdir(parents=True, exist_ok=True)
    (watched / "data/annotations/first.jsonl").write_text(ANNOTATION)
    start(WATCH, watched, shell)
    announced = "announced 1 changed files: data/annotations/first.jsonl"
    assert announced in [ended["state"]["message"] for ended in flow_runs(shell, WATCH)]
    wait_until(
        lambda: [r for r in flow_runs(shell, PIPELINE) if r["end_time"]], 2400, "end of the round"
    )
    (round_,) = flow_runs(shell, PIPELINE)
    assert round_["state"]["type"] == "COMPLETED", round_["state"]
    assert round_["created_by"]["type"] == "AUTOMATION"
    challenger = client.get_model_version_by_alias(POLICY, "challenger")
    assert challenger.version == "2" and set(before) < set(records(watched))
    collected = str(read_table(watched / "data/raw/preferences/data.parquet").to_pydict())
    assert "How do I boil an egg?" in collected

    after = records(watched)
    start(WATCH, watched, shell)
    assert flow_runs(shell, WATCH)[0]["state"]["message"] == "no new data"
    start(PIPELINE, watched, shell)
    again = flow_runs(shell, PIPELINE)
    assert len(again) == 2 and again[0]["state"]["message"].startswith(
        "nothing to do: every stage is up to date"
    )
    assert records(watched) == after
