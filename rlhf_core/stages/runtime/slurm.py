"""A stage as one Slurm job of several nodes: submitted, waited for, and stopped with this process.

Its nodes run ``rlhf stage`` on the shared workspace and meet at the first of them. Slurm puts the
job back into the queue when it is preempted or its time is up, and the stage resumes.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config.operations import Placement
from rlhf_core.errors import EXIT_OK, EXIT_PREEMPTED, Preempted, RlhfError
from rlhf_core.runtime.preemption import PreemptionSignal
from rlhf_core.stages.runtime.launcher import OUTCOMES, StageExit

logger = logging.getLogger(__name__)

RENDEZVOUS_VARIABLE = "RLHF_RENDEZVOUS"  # set on the nodes of such a job
COMMAND = (sys.executable, "-m", "rlhf_core", "stage")  # of a node, before the stage's name
POLL_SECONDS = 2.0
CANCEL_SECONDS = 60.0
ANSWERS = 30  # how often Slurm is asked for an earlier job before it counts as silent
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING")
RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT")
FORGOTTEN = "UNKNOWN"  # Slurm forgets a job some minutes after its end
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}

# A node that was stopped (75) must not end the others, which may still be saving, and its shell must
# outlive the signal. What Slurm stops
# goes back into the queue, unless whoever submitted the job has asked for its end.
SCRIPT = r"""#!/usr/bin/env bash
set -uo pipefail
rm -f OUTCOMES/STAGE.node-*.json
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RLHF_RENDEZVOUS=$first:$((20000 + SLURM_JOB_ID % 20000))
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
stopped=
trap 'stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
# shellcheck disable=SC2016
node='trap : TERM; "$@"; status=$?; exit $((status == 75 ? 0 : status))'
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c "$node" node NODE_COMMAND &
step=$!
status=0
wait "$step" || status=$?
# A signal interrupts the wait, not the step.
while kill -0 "$step" 2>/dev/null; do
  status=0
  wait "$step" || status=$?
done
if [[ -n $stopped ]] || grep -qs '"exit_code": 75' OUTCOMES/STAGE.node-*.json; then
  if [[ -e END ]]; then exit 75; fi
  if [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then
    echo "STAGE was stopped; its job goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$status"
"""


def is_node() -> bool:
    """Whether this process is a node of a job that :func:`run_as_job` submitted."""
    return RENDEZVOUS_VARIABLE in os.environ


def node_outcome(folder: Path, stage: str) -> Path:
    """Where this node of a job leaves the outcome of its part of the stage."""
    return folder / f"{stage}.node-{os.environ.get('SLURM_NODEID', '0')}.json"


@dataclass(frozen=True)
class _State:
    """What Slurm says of a job: its state, why it waits, and how often it was put back."""

    name: str
    reason: str
    restarts: int


class SlurmJob:
    """The job of one stage in one workspace, of which there is one at a time."""

    def __init__(self, stage: str, workspace: Path) -> None:
        self.stage, self.workspace = stage, workspace.resolve()
        folder = self.workspace / ".rlhf" / "slurm"
        folder.mkdir(parents=True, exist_ok=True)
        self.number_file = folder / f"{stage}.job"
        self.end_file = folder / f"{stage}.end"
        self.script = folder / f"{stage}.sbatch"
        self.log = folder / f"{stage}.log"
        self.number = ""
        self._shown = 0

    def end_earlier(self) -> None:
        """End the job of a process that died: both would write the same files."""
        if self.number_file.is_file():
            self.number = self.number_file.read_text(encoding="utf-8").strip()
            state = self.state()
            for _ in range(ANSWERS):
                if state is not None:
                    break
                time.sleep(POLL_SECONDS)
                state = self.state()
            else:
                raise RlhfError(
                    f"{self.stage}: Slurm does not say whether its job {self.number} still runs; try again"
                )
            if state.name in (*WAITING, *RUNNING):
                logger.warning(
                    "%s: job %s of an earlier run goes on; it is ended, and its state is kept",
                    self.stage,
                    self.number,
                )
                self.request_end()
                self.end(CANCEL_SECONDS)
            self.number_file.unlink(missing_ok=True)

    def submit(self, place: Placement) -> None:
        """Submit the job.

        Raises:
            RlhfError: Slurm refuses it, with its own line.
        """
        self.end_file.unlink(missing_ok=True)
        command = [*COMMAND, self.stage, "--workspace", str(self.workspace)]
        filled = {
            "NODE_COMMAND": shlex.join(command),
            "OUTCOMES": shlex.quote(str(self.workspace / OUTCOMES)),
            "END ]]": f"{shlex.quote(str(self.end_file))} ]]",
            "STAGE": self.stage,
        }
        # In one pass: a path may hold one of these words.
        names = "|".join(map(re.escape, filled))
        text = re.sub(names, lambda found: filled[found[0]], SCRIPT)
        self.script.write_text(text, encoding="utf-8")
        self._shown = self.log.stat().st_size if self.log.exists() else 0
        options = [f"--job-name=rlhf-{self.stage}", f"--chdir={self.workspace}"]
        options += [f"--output={self.log}", *job_options(place)]
        submitted = _slurm("sbatch", "--parsable", *options, str(self.script))
        if submitted.returncode:
            raise RlhfError(
                f"{self.stage}: Slurm does not take its job of {place.nodes} node(s): {_line(submitted)}; see "
                f"pools.{self.stage}"
            )
        self.number = submitted.stdout.strip().partition(";")[0]
        self.number_file.write_text(self.number, encoding="utf-8")

    def state(self) -> _State | None:
        """The job's state; None while Slurm's controller does not answer."""
        shown = _slurm("scontrol", "--oneliner", "show", "job", self.number)
        fields = dict(re.findall(r"\b(JobState|Reason|Restarts)=(\S+)", shown.stdout))
        if shown.returncode or "JobState" not in fields:
            return _State(FORGOTTEN, "", 0) if "nvalid job id" in shown.stderr else None
        restarts = int(fields.get("Restarts", "0"))
        return _State(fields["JobState"], fields.get("Reason", "None"), restarts)

    def request_end(self) -> bool:
        """Ask the nodes to save their state and end, and the job not to go back into the queue."""
        self.end_file.touch()
        state = self.state()
        if state is not None and state.name in WAITING:
            _slurm("scancel", self.number)
        else:
            _slurm("scancel", "--signal=TERM", self.number)
        return True

    def end(self, seconds: float) -> None:
        """Wait for the job's end, and cancel it after ``seconds``."""
        deadline, cancelled = time.monotonic() + seconds, False
        while (state := self.state()) is None or state.name in (*WAITING, *RUNNING):
            if time.monotonic() > deadline:
                if cancelled:
                    return
                _slurm("scancel", self.number)
                deadline, cancelled = time.monotonic() + CANCEL_SECONDS, True
            time.sleep(POLL_SECONDS)

    def show_log(self) -> None:
        """Print what the job has written since the last call."""
        if not self.log.exists():
            return
        with self.log.open("rb") as stream:
            stream.seek(self._shown)
            added = stream.read()
        self._shown += len(added)
        sys.stderr.write(added.decode("utf-8", errors="replace"))
        sys.stderr.flush()


def run_as_job(
    stage: str, workspace: Path, place: Placement, stop_grace: float, preemption: PreemptionSignal
) -> None:
    """Run a stage as a Slurm job and wait for its end.

    Args:
        stage: Name of the stage.
        workspace: Its workspace, which all nodes see under the same path.
        place: What the job asks for.
        stop_grace: Seconds after SIGTERM in which it may save its state before it is cancelled.
        preemption: What has received SIGTERM.

    Raises:
        RlhfError: the job failed, with the cause and exit code of the node that failed first.
        Preempted: it was stopped.
    """
    if shutil.which("sbatch") is None:
        raise RlhfError(
            f"{stage}: pools.{stage}.nodes is {place.nodes}, and there is no `sbatch` here: start the worker of "
            f"{place.pool} where Slurm's commands are, or leave nodes out"
        )
    job = SlurmJob(stage, workspace)
    job.end_earlier()
    job.submit(place)
    try:
        with preemption.forwarded(job.request_end):
            state = _await_end(job, place, stop_grace, preemption)
    except BaseException:
        job.request_end()
        job.end(stop_grace)
        raise
    finally:
        job.show_log()
    job.number_file.unlink(missing_ok=True)
    _raise_failure(job, state, preemption)


def _await_end(
    job: SlurmJob, place: Placement, stop_grace: float, preemption: PreemptionSignal
) -> _State:
    """Wait for the job's end; say when it waits, starts and is put back."""
    said = ""
    stopped: float | None = None
    while True:
        state = job.state()
        job.show_log()
        if state is not None:
            if state.name not in (*WAITING, *RUNNING):
                return state
            news = _news(job, place, state)
            if news != said:
                logger.warning("%s", news)
                said = news
        if preemption.received:
            stopped = time.monotonic() if stopped is None else stopped
            if time.monotonic() - stopped > stop_grace:
                job.end(0)
        time.sleep(POLL_SECONDS)


def _news(job: SlurmJob, place: Placement, state: _State) -> str:
    again = f", put back {state.restarts} time(s)" if state.restarts else ""
    if state.name in WAITING:
        why = f" ({state.reason})" if state.reason != "None" else ""
        return f"{job.stage}: Slurm job {job.number} waits for {place.nodes} node(s){why}{again}"
    return f"{job.stage}: Slurm job {job.number} runs on {place.nodes} node(s){again}"


def _raise_failure(job: SlurmJob, state: _State, preemption: PreemptionSignal) -> None:
    """Raise what ended the job, unless it is done."""
    folder = job.workspace / OUTCOMES
    outcomes = [StageExit.load(file) for file in folder.glob(f"{job.stage}.node-*.json")]
    failed = [one for one in outcomes if one is not None and one.exit_code != EXIT_OK]
    for file in folder.glob(f"{job.stage}.node-*.json"):
        file.unlink(missing_ok=True)
    causes = [one for one in failed if one.exit_code != EXIT_PREEMPTED]
    if causes:
        first = min(causes, key=lambda one: one.ended)
        raise RlhfError(first.message, first.exit_code)
    if state.name == "CANCELLED" and not preemption.received:
        raise RlhfError(
            f"{job.stage}: somebody cancelled Slurm job {job.number}; the same command goes on from the last checkpoint"
        )
    if failed or preemption.received:
        raise Preempted(
            failed[0].message if failed else f"{job.stage}: Slurm job {job.number} was stopped"
        )
    if state.name not in ("COMPLETED", FORGOTTEN) or not outcomes:
        why = f" ({state.reason})" if state.reason not in ("None", "") else ""
        raise RlhfError(
            f"{job.stage}: Slurm job {job.number} ended as {state.name}{why}; see {job.log}. The same command goes on "
            "from the last checkpoint",
            exit_code=1,
        )


def job_options(place: Placement) -> list[str]:
    """What a job asks for, as options of ``sbatch``; a person's own come last and win."""
    options = [f"--nodes={place.nodes}", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    options.append("--signal=B:TERM@180")  # before the time limit
    if place.gpus:
        options.append(f"--gpus-per-node={place.gpus}")
    if place.cpus is not None:
        options.append(f"--cpus-per-task={max(round(_amount(place.cpus)), 1)}")
    if place.memory is not None:
        options.append(f"--mem={round(_amount(place.memory) / (1 << 20))}M")
    if place.time_limit_seconds is not None:
        options.append(f"--time={-(-place.time_limit_seconds // 60)}")
    return [*options, *place.sbatch]


def _amount(quantity: str) -> float:
    """A quantity as Kubernetes writes it, such as ``64Gi`` or ``500m``."""
    match = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", quantity)
    assert match is not None, quantity
    number, unit = float(match[1]), match[2]
    return number / 1000 if unit == "m" else number * (UNITS | BINARY_UNITS)[unit]


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def _line(ended: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    return lines[-1].removeprefix("sbatch: ") if lines else f"exit code {ended.returncode}"
