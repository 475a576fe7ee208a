#!/usr/bin/env bash
# Runs one stage of a workspace, on this machine alone or as one node of several; every node of a job runs this script.
#
#   RLHF_WORKSPACE=/shared/workspace run-stage.sh STAGE
#
# On one node DVC runs the stage, which starts as many processes as compute.launch in params.yaml says. On several,
# torchrun starts NPROC_PER_NODE ranks on each, and once they are done node 0 commits the result to DVC's lock and cache.
# The number of this node and the rendezvous come from NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, else from Slurm,
# else from an indexed Kubernetes job.
#
# SIGTERM or SIGINT stops the stage, which then has STOP_GRACE seconds to finish its step and save its state. The exit
# status is then 75 (or STOPPED_STATUS), also if only the stage or another node was stopped. Run the script again to resume.
set -euo pipefail

readonly EXIT_PREEMPTED=${STOPPED_STATUS:-75}
stage=${1:?usage: run-stage.sh STAGE}
nodes=${NNODES:-${SLURM_NNODES:-1}}
node=${NODE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-0}}}
ranks=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
grace=${STOP_GRACE:-60}
stopped=
child=

stop() {
  stopped=yes
  if [[ -n $child ]]; then kill -TERM "$child" 2>/dev/null || true; fi
}
trap stop TERM INT

# Runs a command under the supervisor, which stops all its descendants when the command or this script ends.
guarded() {
  [[ -z $stopped ]] || exit "$EXIT_PREEMPTED"
  python -m flows.supervision.supervisor --parent $$ --grace "$grace" -- "$@" &
  child=$!
  local status=0
  wait "$child" || status=$?
  # A signal interrupts the wait, not the command.
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  child=
  [[ -z $stopped ]] || exit "$EXIT_PREEMPTED"
  return "$status"
}

# The stage's own report decides: DVC and torchrun exit with the same status for every failure.
failed() {
  if grep -qs '"exit_code": 75' ".rlhf/outcomes/$stage.json"; then exit "$EXIT_PREEMPTED"; fi
  exit "$1"
}

cd "${RLHF_WORKSPACE:?set it to a folder with params.yaml and dvc.yaml}"
if ((node == 0)); then
  mkdir -p .rlhf
  exec 9>>.rlhf/lock
  if ! flock --nonblock 9; then
    echo "run-stage.sh: $PWD is in use by a pipeline or another job; wait for it, or stop it" >&2
    exit 2
  fi
  rm -f ".rlhf/outcomes/$stage.json"
  python -m flows.workspace .
fi

rlhf fingerprint
if ((nodes == 1)); then
  guarded dvc --wait-for-lock repro --single-item "$stage" || failed $?
  exit
fi

if [[ $(dvc --wait-for-lock status --json "$stage") == '{}' ]]; then
  echo "run-stage.sh: $stage is up to date"
  exit
fi
# The ranks handle SIGTERM and stop at the same step. torchrun must ignore it: it would kill them half a minute later.
guarded bash -c 'trap "" TERM; shift; exec "$@"' ranks -- torchrun \
  --nnodes "$nodes" --node-rank "$node" --nproc-per-node "$ranks" --max-restarts 0 \
  --signals-to-handle SIGINT,SIGHUP,SIGQUIT --master-addr "${MASTER_ADDR:-127.0.0.1}" \
  --master-port "${MASTER_PORT:-29500}" --no-python rlhf stage "$stage" || failed $?
if ((node == 0)); then
  guarded dvc --wait-for-lock commit --force "$stage"
fi
