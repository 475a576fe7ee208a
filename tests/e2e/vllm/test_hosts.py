"""Roles on hosts of their own: two train critic and policy by ZeRO 3, a third samples, a fourth
scores.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import yaml
from background import running
from commands import command_environment
from faults.network import Host, joined_hosts
from faults.test_two_hosts import stage_command, train_on
from integration.flow_toys import rlhf
from vllm_service import SMALL, VLLM_MARKS, VLLM_PYTHON

pytestmark = VLLM_MARKS
SETTINGS = (
    "collect.world.demonstrations=400", "collect.world.preferences=800", "collect.world.pretrain=100", "sft.steps=30",
    "reward.steps=10", "referee.steps=10", "critic.max_rollouts=1", "ppo.iterations=2", "ppo.batch_size=16",
    "ppo.max_new_tokens=16", "ppo.selection.every=2", "ppo.selection.prompts=8", "ppo.health.mode=report",
    "ppo.ptx.batch_size=4", "critic.batch_size=16", "gates.mode=report", "pools={}",
    "base.heads=2",  # vLLM has no kernels for heads of fewer than 32 dimensions
)  # fmt: skip
SCORER = """
import http.server, json, sys
class Scorer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        body = json.dumps({"scores": [float(item["finished"]) for item in items]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer((sys.argv[1], 8100), Scorer).serve_forever()
"""


def prepared(folder: Path, trainers: list[Host], sampler: Host, scorer: Host) -> Path:
    """A workspace with everything up to the critic, whose critic and PPO are for these hosts."""
    sets = [word for value in SETTINGS for word in ("--set", value)]
    made = rlhf("init", str(folder), "--profile", "smoke", *sets, cwd=folder.parent)
    assert made.returncode == 0, made.stderr
    for stage in ("collect", "validate", "base", "sft", "gate-sft", "reward", "referee"):
        done = rlhf("stage", stage, cwd=folder, timeout=900, RLHF_TRACKING="off")
        assert done.returncode == 0, done.stderr
    (folder / "gates" / "reward.pass").touch()
    params = yaml.safe_load((folder / "params.yaml").read_text())
    meet = {"processes": 1, "nodes": 2, "rendezvous": f"{trainers[0].name}:29512"}
    launch = {"engine": "deepspeed", "zero": 3, "frozen": "sharded", **meet}
    params["compute"]["launch"] = {"critic": launch, "ppo": launch}
    params["ppo"] |= {
        "importance_sampling_correction": {"mode": "always"},
        "sampler": {
            "kind": "vllm",
            "url": f"http://{sampler.name}:8000",
            "weights_folder": str(folder / "weights"),
        },
        "reward": params["ppo"].get("reward", {})
        | {
            "sources": [
                {"kind": "model"},
                {"kind": "http", "name": "ended", "url": f"http://{scorer.name}:8100/score"},
            ]
        },
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    return folder


def test_two_hosts_train_while_a_third_samples_and_a_fourth_scores(tmp_path: Path) -> None:
    with joined_hosts(4) as hosts, ExitStack() as stack:
        *trainers, sampler, scorer = hosts
        workspace = prepared(tmp_path / "run", trainers, sampler, scorer)
        assert VLLM_PYTHON is not None
        serve = [
            str(Path(VLLM_PYTHON).parent / "vllm"), "serve", str(workspace / "models" / "sft"),
            "--host", sampler.address,
            "--served-model-name", "policy", "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager",
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--max-model-len", "256",
        ]  # fmt: skip
        for host, command, variables in (
            (sampler, serve, SMALL | {"VLLM_SERVER_DEV_MODE": "1", "TORCH_COMPILE_DISABLE": "1"}),
            (scorer, [sys.executable, "-c", SCORER, scorer.address], {}),
        ):
            environment = command_environment(**variables)
            stack.enter_context(
                running(
                    [*host.prefix, *command], tmp_path / "logs", environment, f"{host.name}.log"
                )
            )
        for stage in ("critic", "ppo"):
            train_on(trainers, workspace, stage_command(workspace, stage))
    rows = [
        json.loads(line) for line in (workspace / "history" / "ppo.jsonl").read_text().splitlines()
    ]
    assert [row["iteration"] for row in rows] == [1, 2]
    for row in rows:
        assert row["sampling_logp_difference_mean"] < 1e-4
        assert 0 <= row["source_ended_mean"] <= 1
    assert json.loads((workspace / "metrics" / "ppo.json").read_text())["selected_iteration"] == 2
    assert (workspace / "models" / "policy" / "model.safetensors").is_file()
