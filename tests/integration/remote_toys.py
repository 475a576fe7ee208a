"""A pipeline whose `ppo` runs on another host, an external Prefect server, and a worker with a home
of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from background import running, wait_until
from integration.flow_toys import environment, make_toy

POOL = "away"
PIPELINE = """
stages:
  collect: {cmd: mkdir -p raw && echo x > raw/rows.txt, outs: [raw]}
  ppo:
    cmd: python ppo.py
    deps: [ppo.py, raw]
    params: [seed]
    outs: [policy.txt]
    metrics: [metrics.json]
  report: {cmd: cat policy.txt metrics.json > report.html, deps: [policy.txt, metrics.json], outs: [report.html]}
"""
# Resumes from work/, notes the step it started at, and at the end runs the script of a test if
# there is one.
TRAIN = """
import os, pathlib, subprocess, time, yaml
steps = yaml.safe_load(open("params.yaml"))["seed"]
work = pathlib.Path("work/ppo"); work.mkdir(parents=True, exist_ok=True)
saved = work / "step"
start = int(saved.read_text()) if saved.exists() else 0
with open(os.environ["TOY_STARTS"], "a") as log: log.write(f"{start} {os.getcwd()}\\n")
for step in range(start, steps):
    time.sleep(float(os.environ.get("TOY_SECONDS", "0.1")))
    (work / "part").write_text(str(step + 1)); (work / "part").replace(saved)
    print(f"ppo: {step + 1}/{steps}", flush=True)
pathlib.Path("policy.txt").write_text("done " + open("raw/rows.txt").read())
pathlib.Path("metrics.json").write_text('{"reward": 1.5}')
last = pathlib.Path(os.environ["TOY_STARTS"] + ".at-the-end")
if last.exists(): subprocess.run(["sh", str(last)], check=True)
"""


def params(steps: int = 4, retries: int = 0, deliver_seconds: int = 1) -> str:
    """Return params.yaml; the toy uses the seed as its number of steps."""
    return (
        f"seed: {steps}\nflow: {{retries: {retries}, retry_delay_seconds: 1}}\n"
        f"pools: {{ppo: {{pool: {POOL}, shared: false, deliver_seconds: {deliver_seconds}}}}}\n"
    )


def make_clone(folder: Path, remote: Path | None, text: str) -> Path:
    """Create a clone of the project: recipe, code and DVC's settings."""
    toy = make_toy(folder, PIPELINE, text)
    (toy / "ppo.py").write_text(TRAIN)
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "--no-scm", "-q"], cwd=toy, check=True, env=environment())
    if remote is not None:
        subprocess.run(
            [*dvc, "remote", "add", "-q", "-d", "store", str(remote)],
            cwd=toy,
            check=True,
            env=environment(),
        )
    return toy


@dataclass(frozen=True)
class Host:
    """The worker's host: its home with the file in which the toy notes its starts, and the prefix
    of commands on it.
    """

    home: Path
    url: str
    prefix: tuple[str, ...] = ()

    @property
    def starts(self) -> list[str]:
        file = self.home / "starts"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def script_at_the_end(self) -> Path:
        return self.home / "starts.at-the-end"

    @contextmanager
    def worker(self, **extra: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a process worker of the pool with none of the caller's environment."""
        env = environment(
            HOME=str(self.home),
            PREFECT_HOME=str(self.home / "prefect"),
            PREFECT_API_URL=self.url,
            PREFECT_WORKER_QUERY_SECONDS="2",
            TOY_STARTS=str(self.home / "starts"),
            **extra,
        )
        command = [
            sys.executable,
            "-m",
            "prefect",
            "worker",
            "start",
            "--pool",
            POOL,
            "--type",
            "process",
        ]
        with running(
            [*self.prefix, *command, "--install-policy", "never"], self.home, env, "worker.log"
        ) as process:
            ready = f"{self.url}/work_pools/{POOL}/workers/filter"
            wait_until(lambda: any(_online(ready)), 400, "worker")
            yield process


def _online(address: str) -> list[bool]:
    answer = httpx.post(address, json={}, timeout=60)
    return [row["status"] == "ONLINE" for row in answer.json()] if answer.status_code == 200 else []


def caller_environment(url: str, folder: Path) -> dict[str, str]:
    """Return the environment of the caller's commands: the server, and a home for Prefect."""
    return {
        "PREFECT_API_URL": url,
        "PREFECT_HOME": str(folder / "caller"),
        "HOME": os.environ.get("HOME", "/root"),
    }
