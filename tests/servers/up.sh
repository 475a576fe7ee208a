#!/usr/bin/env bash
# Starts real servers on loopback: PostgreSQL, MLflow and Prefect on it, each with a login, and an S3 store.
#
#   tests/servers/up.sh check            say which of them can be started here
#   tests/servers/up.sh up [NAME…]       start all, or those named, and say how a shell uses them
#   tests/servers/up.sh status           say which are up, and where
#   tests/servers/up.sh kill NAME…       end servers with SIGKILL, as a crash does; `up NAME` restarts them
#   tests/servers/up.sh down [NAME…]     stop all, or those named, and delete their data if all are stopped
#
# Names are postgres, s3, mlflow and prefect. Ports are free ones, passwords random, and both stay until `down`. Data,
# logs and passwords are in a folder that RLHF_SERVERS names, by default rlhf-servers-UID in the temporary folder; its
# file `env` holds what a shell needs. A server that is not installed is left out with a line that says why.
set -euo pipefail

folder=${RLHF_SERVERS:-${TMPDIR:-/tmp}/rlhf-servers-$(id -u)}
python=${PYTHON:-python}
everything=(postgres s3 mlflow prefect)
wait_seconds=300
# Filled in from the file `settings` of the folder.
postgres_port='' s3_port='' mlflow_port='' prefect_port=''
postgres_password='' mlflow_password='' prefect_password='' mlflow_secret='' s3_secret=''
export DO_NOT_TRACK=1 MLFLOW_DISABLE_TELEMETRY=true PREFECT_SERVER_ANALYTICS_ENABLED=false
PATH=$PATH:/usr/sbin  # runuser, which a login shell of a plain user may not have
umask 077

fail() {
  echo "up.sh: $*" >&2
  exit 2
}

# --- what is installed ---

postgres_programs() {
  local path
  for path in "$(dirname "$(command -v initdb 2>/dev/null || echo /none/initdb)")" /usr/lib/postgresql/*/bin; do
    if [[ -x $path/initdb && -x $path/pg_ctl ]]; then
      readlink -f "$path"
      return
    fi
  done
  return 1
}

has_modules() { "$python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "$@"; }

# Prints why the server $1 cannot be started here; nothing if it can.
missing() {
  case $1 in
    postgres)
      postgres_programs >/dev/null || echo "PostgreSQL is not installed (Debian: apt-get install postgresql)"
      if [[ $(id -u) == 0 ]] && ! id postgres &>/dev/null; then
        echo "PostgreSQL does not run as root, and there is no user postgres"
      fi
      ;;
    s3) has_modules moto flask flask_cors boto3 || echo "moto's server is not installed (pip install 'moto[s3]' flask-cors boto3)" ;;
    mlflow)
      missing postgres
      has_modules mlflow psycopg2 flask_wtf || echo "its login needs pip install psycopg2-binary Flask-WTF"
      ;;
    prefect)
      missing postgres
      has_modules prefect asyncpg || echo "it needs pip install prefect asyncpg"
      ;;
    *) fail "unknown server '$1'; one of ${everything[*]}" ;;
  esac
}

check() {
  local name reason
  for name in "${everything[@]}"; do
    reason=$(missing "$name" | head -n 1)
    echo "$name: ${reason:-can be started here}"
  done
}

# --- ports, passwords and processes ---

# Chooses ports and passwords on the first call; later calls keep them.
prepare_folder() {
  mkdir -p "$folder"
  chmod 711 "$folder" # PostgreSQL runs as another user where this one is root
  if [[ ! -f $folder/settings ]]; then
    local ports names=(postgres_password mlflow_password prefect_password mlflow_secret s3_secret) name
    ports=$("$python" -c '
import socket
sockets = [socket.socket() for _ in range(4)]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))')
    {
      read -r -a ports <<<"$ports"
      echo "postgres_port=${ports[0]} s3_port=${ports[1]} mlflow_port=${ports[2]} prefect_port=${ports[3]}"
      for name in "${names[@]}"; do
        echo "$name=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')"
      done
    } >"$folder/settings.part"
    mv "$folder/settings.part" "$folder/settings"
  fi
  # shellcheck disable=SC1091
  source "$folder/settings"
}

# When process $1 was started; nothing if it has ended.
start_time() { ps -o stat=,lstart= -p "$1" 2>/dev/null | sed -n '/^Z/!s/^[^ ]* *//p'; }

# Whether the server $1 runs. A process id that another program has taken since does not count.
is_up() {
  local pid started
  [[ -f $folder/$1.pid ]] || return 1
  { read -r pid && read -r started; } <"$folder/$1.pid" || return 1
  [[ -n $started && $(start_time "$pid") == "$started" ]]
}

# Runs the command after $1 as server $1, in a session of its own.
launch() {
  local name=$1 pid
  shift
  setsid "$@" >>"$folder/$name.log" 2>&1 </dev/null &
  pid=$!
  printf '%s\n%s\n' "$pid" "$(start_time "$pid")" >"$folder/$name.pid"
}

# Waits until the server $1 answers at the address $2.
await() {
  "$python" - "$2" "$wait_seconds" "$(head -n 1 "$folder/$1.pid")" <<'PYTHON' || fail "$1 did not start; see $folder/$1.log"
import subprocess, sys, time, urllib.error, urllib.request

url, seconds, pid = sys.argv[1], float(sys.argv[2]), sys.argv[3]
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
deadline = time.monotonic() + seconds
while time.monotonic() < deadline:
    try:
        opener.open(url, timeout=5).close()
        sys.exit(0)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            sys.exit(0)
    except OSError:
        pass
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
    if not state.strip() or state.startswith("Z"):
        sys.exit(1)
    time.sleep(0.2)
sys.exit(1)
PYTHON
}

# --- the servers ---

as_postgres() {
  if [[ $(id -u) == 0 ]]; then
    runuser -u postgres -- "$@"
  else
    "$@"
  fi
}

start_postgres() {
  local programs data=$folder/postgres
  programs=$(postgres_programs)
  if [[ ! -d $data ]]; then
    mkdir "$data"
    printf '%s\n' "$postgres_password" >"$folder/postgres.password"
    if [[ $(id -u) == 0 ]]; then
      chown postgres "$data" "$folder/postgres.password"
    fi
    as_postgres "$programs/initdb" -D "$data" -U rlhf --auth=scram-sha-256 --pwfile="$folder/postgres.password" \
      --encoding=UTF8 --no-locale >"$folder/postgres.init.log"
    rm "$folder/postgres.password"
    as_postgres tee -a "$data/postgresql.conf" >/dev/null <<CONFIG
listen_addresses = '127.0.0.1'
port = $postgres_port
unix_socket_directories = '$data'
max_connections = 200
CONFIG
  fi
  (cd / && as_postgres "$programs/pg_ctl" -w -s -D "$data" -l "$data/server.log" start)
  local pid
  pid=$(as_postgres head -n 1 "$data/postmaster.pid")
  printf '%s\n%s\n' "$pid" "$(start_time "$pid")" >"$folder/postgres.pid"
  printf '127.0.0.1:*:*:rlhf:%s\n' "$postgres_password" >"$folder/pgpass"
  local database known
  known=$(PGPASSFILE=$folder/pgpass psql -h 127.0.0.1 -p "$postgres_port" -U rlhf -d postgres -Atc 'SELECT datname FROM pg_database')
  for database in mlflow logins prefect; do
    if ! grep -qx "$database" <<<"$known"; then
      PGPASSFILE=$folder/pgpass createdb -h 127.0.0.1 -p "$postgres_port" -U rlhf "$database"
    fi
  done
}

start_s3() {
  launch s3 "$python" -m moto.server -H 127.0.0.1 -p "$s3_port"
  await s3 "http://127.0.0.1:$s3_port/moto-api/"
  AWS_ACCESS_KEY_ID=rlhf AWS_SECRET_ACCESS_KEY=$s3_secret AWS_DEFAULT_REGION=us-east-1 \
    "$python" - "http://127.0.0.1:$s3_port" <<'PYTHON'
import sys
import boto3

boto3.client("s3", endpoint_url=sys.argv[1]).create_bucket(Bucket="mlflow")
PYTHON
}

start_mlflow() {
  local artifacts=$folder/artifacts database=postgresql+psycopg2://rlhf:$postgres_password@127.0.0.1:$postgres_port
  local -a storage=()
  if is_up s3; then
    artifacts=s3://mlflow
    storage=(MLFLOW_S3_ENDPOINT_URL="http://127.0.0.1:$s3_port" AWS_DEFAULT_REGION=us-east-1)
    export AWS_ACCESS_KEY_ID=rlhf AWS_SECRET_ACCESS_KEY=$s3_secret
  fi
  cat >"$folder/auth.ini" <<CONFIG
[mlflow]
default_permission = READ
database_uri = $database/logins
admin_username = rlhf
admin_password = $mlflow_password
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 300
CONFIG
  # One worker: with four, those that start slowly are killed before they are ready.
  (
    export MLFLOW_BACKEND_STORE_URI=$database/mlflow MLFLOW_FLASK_SERVER_SECRET_KEY=$mlflow_secret
    export MLFLOW_AUTH_CONFIG_PATH=$folder/auth.ini MLFLOW_ARTIFACTS_DESTINATION=$artifacts
    export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false # seven processes for the judging of traces
    unset MLFLOW_TRACKING_URI MLFLOW_REGISTRY_URI
    cd "$folder"
    launch mlflow env "${storage[@]}" "$python" -m mlflow server --host 127.0.0.1 --port "$mlflow_port" \
      --serve-artifacts --app-name basic-auth --workers 1
  )
  unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY
  await mlflow "http://127.0.0.1:$mlflow_port/health"
}

start_prefect() {
  (
    export PREFECT_API_DATABASE_CONNECTION_URL=postgresql+asyncpg://rlhf:$postgres_password@127.0.0.1:$postgres_port/prefect
    export PREFECT_SERVER_API_AUTH_STRING=rlhf:$prefect_password PREFECT_HOME=$folder/prefect
    export PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem
    unset PREFECT_API_URL PREFECT_API_KEY PREFECT_PROFILE PREFECT_API_AUTH_STRING
    launch prefect "$python" -m prefect server start --host 127.0.0.1 --port "$prefect_port"
  )
  await prefect "http://127.0.0.1:$prefect_port/api/health"
}

# --- commands ---

write_environment() {
  {
    if is_up mlflow; then
      echo "export MLFLOW_TRACKING_URI=http://127.0.0.1:$mlflow_port"
      echo "export MLFLOW_TRACKING_USERNAME=rlhf MLFLOW_TRACKING_PASSWORD=$mlflow_password"
    fi
    if is_up prefect; then
      echo "export PREFECT_API_URL=http://127.0.0.1:$prefect_port/api PREFECT_API_AUTH_STRING=rlhf:$prefect_password"
    fi
    if is_up s3; then
      echo "export AWS_ENDPOINT_URL_S3=http://127.0.0.1:$s3_port AWS_DEFAULT_REGION=us-east-1"
      echo "export AWS_ACCESS_KEY_ID=rlhf AWS_SECRET_ACCESS_KEY=$s3_secret"
    fi
  } >"$folder/env"
}

up() {
  local name reason
  prepare_folder
  for name in "$@"; do
    if is_up "$name"; then
      continue
    fi
    reason=$(missing "$name" | head -n 1)
    if [[ -n $reason ]]; then
      echo "skipped $name: $reason"
    else
      if [[ $name == mlflow || $name == prefect ]] && ! is_up postgres; then
        start_postgres
      fi
      "start_$name"
    fi
  done
  write_environment
  status
  echo "use them with: source $folder/env"
}

status() {
  local name port_of
  for name in "${everything[@]}"; do
    port_of=${name}_port
    if is_up "$name"; then
      echo "$name: up on 127.0.0.1:${!port_of}"
    else
      echo "$name: down"
    fi
  done
}

# Signals the process group of server $2 with $1; PostgreSQL's processes follow its first one.
signal() {
  local pid
  pid=$(head -n 1 "$folder/$2.pid")
  if [[ $2 == postgres ]]; then
    kill "-$1" "$pid" 2>/dev/null || true
  else
    kill "-$1" -- "-$pid" 2>/dev/null || true
  fi
}

# Waits up to 20 s until the server $1 is gone.
gone() {
  local tenths
  for ((tenths = 0; tenths < 200; tenths++)); do
    is_up "$1" || break
    sleep 0.1
  done
}

stop() {
  local name=$1
  is_up "$name" || return 0
  # A fast shutdown of PostgreSQL is SIGINT; it would wait for its clients after SIGTERM.
  signal "$([[ $name == postgres ]] && echo INT || echo TERM)" "$name"
  gone "$name"
  if is_up "$name"; then
    signal KILL "$name"
  fi
  rm -f "$folder/$name.pid"
}

down() {
  local index name left=
  for ((index = ${#everything[@]} - 1; index >= 0; index--)); do
    name=${everything[index]}
    if [[ $# == 0 || " $* " == *" $name "* ]]; then
      stop "$name"
    elif is_up "$name"; then
      left=yes
    fi
  done
  if [[ -z $left && -f $folder/settings ]]; then
    rm -rf "$folder"
  elif [[ -n $left ]]; then
    write_environment
  fi
}

command=${1:-}
shift || true
if [[ -f $folder/settings ]]; then
  # shellcheck disable=SC1091
  source "$folder/settings"
fi
case $command in
  check) check ;;
  up)
    # shellcheck disable=SC2068
    up ${@:-${everything[@]}}
    ;;
  status) status ;;
  kill)
    for name in "$@"; do
      is_up "$name" || fail "$name is not up"
      signal KILL "$name"
      gone "$name" # else a following `up` may find it still there
    done
    ;;
  down) down "$@" ;;
  *) fail "usage: tests/servers/up.sh check | up [NAME…] | status | kill NAME… | down [NAME…]" ;;
esac
