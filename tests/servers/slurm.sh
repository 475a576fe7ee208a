#!/usr/bin/env bash
# Starts a Slurm cluster of two nodes on this machine, on loopback: munged, slurmctld and a slurmd for each of n1 and n2.
#
#   tests/servers/slurm.sh check     say whether it can be started here
#   tests/servers/slurm.sh up        start it and wait until both nodes are idle
#   tests/servers/slurm.sh down      stop it and delete its data
#
# It needs root, and Debian's slurm-wlm and munge. A node has 16 CPUs, 256 GB and a GPU on paper alone, so that the scripts
# of infra/slurm can ask for what they ask for. Jobs of the partition `high` preempt those of `low`, which go back into
# the queue after 60 seconds. Data and logs are in a folder that RLHF_SLURM names; SLURM_CONF=FOLDER/slurm.conf makes
# Slurm's commands use the cluster.
set -euo pipefail

folder=${RLHF_SLURM:-${TMPDIR:-/tmp}/rlhf-slurm-$(id -u)}
python=${PYTHON:-python}
export SLURM_CONF=$folder/slurm.conf
umask 022

missing() {
  local program
  for program in munged slurmctld slurmd sbatch unshare; do
    if ! command -v "$program" >/dev/null && [[ ! -x /usr/sbin/$program ]]; then
      echo "$program is not installed (Debian: apt-get install --no-install-recommends slurm-wlm munge)"
      return
    fi
  done
  if [[ $(id -u) != 0 ]]; then
    echo "nodes with names of their own need root"
  elif ! unshare --mount true 2>/dev/null; then
    echo "mount namespaces are not permitted here"
  fi
}

write_configuration() {
  local ports
  read -r -a ports < <("$python" -c '
import socket
sockets = [socket.socket() for _ in range(3)]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))')
  mkdir -p "$folder/state" "$folder/spool-n1" "$folder/spool-n2"
  head -c 1024 /dev/urandom >"$folder/munge.key"
  chmod 400 "$folder/munge.key"
  # torchrun looks up the names of the nodes.
  { cat /etc/hosts && echo "127.0.0.1 n1 n2"; } >"$folder/hosts"
  echo "Name=gpu File=/dev/null" >"$folder/gres.conf" # there must be a device file, and no driver is asked
  cat >"$SLURM_CONF" <<CONFIG
ClusterName=rlhf
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=16 RealMemory=256000 Gres=gpu:1
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=16 RealMemory=256000 Gres=gpu:1
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
CONFIG
}

up() {
  local reason
  reason=$(missing)
  if [[ -n $reason ]]; then
    echo "skipped slurm: $reason"
    return
  fi
  export PATH=$PATH:/usr/sbin
  mkdir -p "$folder"
  write_configuration
  munged --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
    --seed-file="$folder/munged.seed" --log-file="$folder/munged.log"
  slurmctld
  # shellcheck disable=SC2016
  unshare --mount bash -c 'mount --bind "$1/hosts" /etc/hosts; slurmd -N n1; slurmd -N n2' bash "$folder"
  local tenths
  for ((tenths = 0; tenths < 600; tenths++)); do
    if [[ $(sinfo --noheader --Node --partition=low --format=%t 2>/dev/null | sort -u) == idle ]]; then
      echo "slurm: up; use it with: export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 0.1
  done
  echo "slurm.sh: the nodes did not become idle; see $folder/*.log" >&2
  exit 2
}

down() {
  local name pid
  if [[ -f $SLURM_CONF ]]; then
    scancel --quiet --user="$(id -un)" 2>/dev/null || true
  fi
  for name in slurmd-n1 slurmd-n2 slurmctld munged; do
    if [[ -f $folder/$name.pid ]]; then
      pid=$(<"$folder/$name.pid")
      if [[ $(ps -o args= -p "$pid") == *"${name%-n?}"* ]]; then
        kill -TERM "$pid"
        while ps -p "$pid" >/dev/null; do sleep 0.1; done
      fi
    fi
  done
  if [[ -f $SLURM_CONF ]]; then
    rm -rf "$folder"
  fi
}

case ${1:-} in
  check)
    reason=$(missing)
    echo "slurm: ${reason:-can be started here}"
    ;;
  up) up ;;
  down) down ;;
  *)
    echo "usage: tests/servers/slurm.sh check | up | down" >&2
    exit 2
    ;;
esac
