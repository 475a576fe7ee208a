"""``rlhf compare``: what a workspace has on disk side by side, and where runs are not
comparable.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.registry.register import RegisteredHere, write_registered
from rlhf_core.errors import RlhfError
from rlhf_core.storage.files import sha256_file
from rlhf_extras.run_comparison.compare import (
    GateStanding,
    RunComparison,
    comparability_warnings,
    read_workspace,
    results_table,
)


def compared(win_rate: float) -> dict[str, float]:
    bounds = {"win_rate_low95": win_rate - 0.1, "win_rate_high95": win_rate + 0.1}
    return {"win_rate": win_rate, "prompts": 9, "clusters": 7, **bounds}


EVALUATION = {
    "sft": {"gold": 0.2, "reward": 0.1, "length": 20.0, "perplexity_preferred": 4.0},
    "policy": {"gold": 0.6, "reward": 0.9, "length": 23.0, "perplexity_preferred": 5.0},
    "kl": 1.5,
    "comparison": {"judge": compared(0.7) | {"lc_win_rate": 0.65}, "gold": compared(0.75)},
}
BEST = {"n": 16, "kl_bound": 1.835, "sampled_tokens_per_reply": 310.0, "gold": 0.5, "length": 21.0,
        "comparison": {"judge": compared(0.6)}}  # fmt: skip
HISTORIES = {
    # Two iterations of PPO with 10 replies each, one of which a rollback repeated.
    "ppo": [
        {"iteration": n, "length": 20.0, "seconds_update": 2.0, "seconds_forward": 1.0}
        for n in (1, 2)
    ],
    "ppo_abandoned": [{"iteration": 2, "length": 30.0, "seconds_update": 2.5, "rollback": 1}],
    "critic": [{"iteration": 1, "seconds_forward": 4.0}],
    "reward": [
        {"step": 10, "seconds": 5.0, "tokens": 100},
        {"step": 20, "seconds": 9.0, "tokens": 200},
    ],
}


def workspace(
    folder: Path,
    hashes: Mapping[str, str] | None = None,
    params: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] = EVALUATION,
    histories: Mapping[str, Any] = HISTORIES,
) -> Path:
    """A workspace with what a finished run leaves, as far as it is compared."""
    for name in ("metrics", "gates", "history"):
        (folder / name).mkdir(parents=True)
    trained = params or {"ppo": {"batch_size": 10, "selection": {"method": "last"}}}
    (folder / "params.yaml").write_text("seed: 1\n")
    (folder / "dvc.yaml").write_text("stages: {}\n")
    metrics = folder / "metrics" / "evaluation.json"
    metrics.write_text(json.dumps(evaluation))
    condition = {
        "metric": "kl",
        "value": 1.5,
        "bound": "<= 1",
        "sign": "<=",
        "limit": 1.0,
        "passed": False,
    }
    gate = {
        "passed": False,
        "conditions": [condition],
        "evidence": {"metrics/evaluation.json": sha256_file(metrics)},
    }
    (folder / "gates" / "policy.json").write_text(json.dumps(gate))
    for name, rows in histories.items():
        (folder / "history" / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    read = {"data/clean": "d", "models/sft": "s", "models/judge": "j", "models/policy": "p"} | dict(
        hashes or {}
    )
    lock = {
        "stages": {
            "ppo": {
                "params": {"params.yaml": trained},
                "outs": [{"path": "models/policy", "md5": "p"}],
            },
            "evaluate": {
                "deps": [{"path": path, "md5": value} for path, value in read.items()],
                "params": {"params.yaml": {"seed": 1, "evaluate": {"prompts": 9}}},
            },
        }
    }
    (folder / "dvc.lock").write_text(json.dumps(lock))
    return folder


def command(*words: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(
        app, ["compare", *map(str, words)]
    )


def test_a_run_is_read_with_its_cost_gate_and_version(tmp_path: Path) -> None:
    folder = workspace(tmp_path / "a")
    write_registered(folder, {"models/policy": RegisteredHere("rlhf-policy", "3")})
    (result,) = read_workspace(folder).results
    assert result.method == "PPO" and result.win_rate is not None
    assert result.win_rate.low95 == pytest.approx(0.6)
    assert result.perplexity_tax == {"preferred": pytest.approx(0.25)}
    assert result.cost.seconds == {
        "policy": 8.5,
        "reward": 9.0,
        "critic": 4.0,
    }  # the referee chose nothing
    assert result.cost.total_seconds == 21.5 and result.cost.sampled_tokens == 700
    assert result.gate == GateStanding("failed", ("kl",), ("kl is 1.5, required ≤ 1",))
    assert result.registered == RegisteredHere("rlhf-policy", "3")


def test_a_version_of_an_earlier_policy_and_a_gate_of_an_earlier_evaluation_do_not_count(
    tmp_path: Path,
) -> None:
    folder = workspace(tmp_path / "a")
    write_registered(folder, {"models/policy": RegisteredHere("rlhf-policy", "3")})
    lock, output = folder / "dvc.lock", '"path": "models/policy", "md5": "%s"'
    lock.write_text(lock.read_text().replace(output % "p", output % "q", 1))
    (folder / "metrics" / "evaluation.json").write_text(json.dumps(EVALUATION | {"kl": 1.6}))
    read = read_workspace(folder)
    (result,) = read.results
    assert result.registered is None and result.gate == GateStanding("outdated")
    assert any("trained anew" in warning for warning in comparability_warnings([read]))


@pytest.mark.parametrize(
    ("params", "method"),
    [
        ({"ppo": {"advantage": {"estimator": "rloo"}}}, "RLOO"),
        ({"ppo": {}, "policy": {"method": "dpo"}}, "DPO"),
        ({"ppo": {}, "policy": {"method": "rejection_sampling"}}, "rejection sampling"),
    ],
)
def test_the_method_is_what_the_policy_was_trained_with(
    tmp_path: Path, params: dict[str, Any], method: str
) -> None:
    (result,) = read_workspace(workspace(tmp_path / "a", params=params)).results
    assert result.method == method


def test_dpo_costs_its_own_steps_alone(tmp_path: Path) -> None:
    histories = HISTORIES | {
        "ppo": [{"step": 5, "seconds": 3.0, "tokens": 700}],
        "ppo_abandoned": [],
    }
    params = {"ppo": {}, "policy": {"method": "dpo"}}
    (result,) = read_workspace(
        workspace(tmp_path / "a", params=params, histories=histories)
    ).results
    assert result.cost.seconds == {"policy": 3.0}
    assert (result.cost.sampled_tokens, result.cost.trained_tokens) == (None, 700)


def test_best_of_n_is_a_column_of_its_own(tmp_path: Path) -> None:
    _, best = read_workspace(
        workspace(tmp_path / "a", evaluation=EVALUATION | {"best_of_n": BEST})
    ).results
    assert best.method == "best of 16" and best.kl_is_bound and best.gate is None
    # No policy, but what chooses.
    assert best.cost.seconds == {"reward": 9.0} and best.cost.total_seconds == 9.0


def test_other_prompts_judges_and_sft_models_are_warned_of(tmp_path: Path) -> None:
    same = [read_workspace(workspace(tmp_path / name)) for name in "ab"]
    assert comparability_warnings(same) == []
    for path in ("data/clean", "models/sft", "models/judge"):
        other = read_workspace(workspace(tmp_path / path.replace("/", "-"), {path: "other"}))
        (warning,) = comparability_warnings([*same, other])
        assert (
            warning.startswith("not comparable")
            and "differ" in warning
            and warning.endswith(other.name)
        )


def test_a_folder_without_results_is_one_line_and_the_others_are_compared(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    unevaluated = workspace(tmp_path / "b")
    (unevaluated / "metrics" / "evaluation.json").unlink()
    done = command(workspace(tmp_path / "a"), tmp_path / "empty", unevaluated)
    assert done.exit_code == 0
    errors = [line for line in done.stderr.splitlines() if line]
    assert len(errors) == 2 and "not a workspace" in errors[0] and "not been evaluated" in errors[1]
    assert "70.0%" in done.stdout
    nothing = command(tmp_path / "empty")
    assert isinstance(nothing.exception, RlhfError) and nothing.exception.exit_code == 2


def test_the_table_fits_80_columns_with_any_number_of_runs(tmp_path: Path) -> None:
    folders = [
        workspace(tmp_path / f"a-rather-long-name-of-run-{n}", {"models/sft": str(n)})
        for n in range(6)
    ]
    comparison = RunComparison.of([*map(read_workspace, folders)])
    output = io.StringIO()
    Console(width=80, file=output).print(results_table(comparison, 80))
    printed = output.getvalue()
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.count("training time") == 2  # four runs side by side, then the others


def test_few_runs_have_their_names_on_one_line(tmp_path: Path) -> None:
    (result,) = read_workspace(workspace(tmp_path / "a")).results
    name = "workspaces/smoke-54f539d1"
    comparison = RunComparison({}, [replace(result, workspace=name)])
    output = io.StringIO()
    Console(width=80, file=output).print(results_table(comparison, 80))
    assert name in output.getvalue()


def test_json_has_everything_and_the_warnings_and_may_go_into_a_file(tmp_path: Path) -> None:
    read = workspace(tmp_path / "a", evaluation=EVALUATION | {"best_of_n": BEST})
    other, file = workspace(tmp_path / "b", {"models/judge": "other"}), tmp_path / "results.json"
    document = json.loads(command(read, other, "--json").stdout)
    assert [run["win_rate"]["value"] for run in document["runs"]] == [0.7, 0.6, 0.7]
    assert (
        document["runs"][0]["cost"]["seconds"]["policy"] == 8.5 and len(document["warnings"]) == 1
    )
    result = command(read, other, "--output", file)
    assert (
        result.exit_code == 0
        and "gold score" in result.output
        and str(file) in result.output.replace("\n", "")
    )
    assert json.loads(file.read_text()) == document


def test_settings_that_add_measurements_do_not_make_runs_incomparable(tmp_path: Path) -> None:
    runs = [workspace(tmp_path / name) for name in "ab"]
    lock = runs[1] / "dvc.lock"
    lock.write_text(
        lock.read_text().replace(
            '{"prompts": 9}', '{"prompts": 9, "best_of_n": 16, "tie_margin": 0.05}'
        )
    )
    assert comparability_warnings([read_workspace(folder) for folder in runs]) == []
    lock.write_text(lock.read_text().replace('"tie_margin": 0.05', '"tie_margin": 0.5'))
    (warning,) = comparability_warnings([read_workspace(folder) for folder in runs])
    assert "tie_margin" in warning


def test_the_table_starts_with_the_settings_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, coefficient in (("a", 0.05), ("b", 0.1)):
        conditions = [
            {"metric": "kl", "at_most": 100 * coefficient, "why": name},
            {"metric": "length", "at_most": 9.0},
        ]
        params = {
            "ppo": {"batch_size": 10, "kl": {"coefficient": coefficient}},
            "gates": {"policy": conditions},
        }
        workspace(tmp_path / name, params=params)
    lines = command("a", "b").stdout.splitlines()
    assert lines[1].split() == ["gates.policy:", "kl", "at_most", "5.0", "at_most", "10.0"]
    assert lines[2].split()[-2:] == ["0.05", "0.1"]
    assert not any("batch_size" in line for line in lines)
    assert json.loads(command("a", "b", "--json").stdout)["settings"] == {
        "gates.policy: kl": {"a": "at_most 5.0", "b": "at_most 10.0"},
        "ppo.kl.coefficient": {"a": "0.05", "b": "0.1"},
    }


@pytest.mark.parametrize("most", [6.0, 3.0])
def test_a_gate_that_closed_is_compared_by_the_settings_that_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: float
) -> None:
    """DVC records nothing of a stage that failed, which is no other setting."""
    monkeypatch.chdir(tmp_path)
    gate = {"gates": {"policy": [{"metric": "kl", "at_most": 6.0}]}}
    workspace(tmp_path / "passed", params={"ppo": {"batch_size": 10}} | gate)
    workspace(tmp_path / "closed", params={"ppo": {"batch_size": 10}})
    (tmp_path / "closed" / "params.yaml").write_text(
        f"gates: {{policy: [{{metric: kl, at_most: {most}}}]}}\n"
    )
    different = {"gates.policy: kl": {"passed": "at_most 6.0", "closed": f"at_most {most}"}}
    document = json.loads(command("passed", "closed", "--json").stdout)
    assert document["settings"] == (different if most != 6.0 else {})


def test_names_of_settings_break_behind_dots_and_underscores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, most in (("a", 1.0), ("b", 2.0)):
        workspace(tmp_path / name, params={"ppo": {"selection": {"max_repetition_increase": most}}})
    lines = [line.split() for line in command("a", "b").stdout.splitlines()]
    assert ["repetition_increase"] in lines and any(
        line[:1] == ["ppo.selection.max_"] for line in lines
    )


@pytest.mark.parametrize("name", ["win_rate", "win_rate_low95", "win_rate_high95"])
def test_a_win_rate_that_is_not_finite_leaves_the_rest_of_the_table(
    tmp_path: Path, name: str
) -> None:
    evaluation = json.loads(json.dumps(EVALUATION))
    evaluation["comparison"]["judge"][name] = None
    text = command(workspace(tmp_path / "one", evaluation=evaluation)).stdout
    assert "75.0%" in text and ("70.0%" in text) == (name != "win_rate")


def test_a_bound_just_below_one_half_is_not_written_as_one_half(tmp_path: Path) -> None:
    equal_length = {"lc_win_rate": 0.567, "lc_win_rate_low95": 0.4996, "lc_win_rate_high95": 0.632}
    judged = {"judge": compared(0.7) | equal_length}
    first, second = (
        workspace(tmp_path / name, evaluation=EVALUATION | {"comparison": judged}) for name in "ab"
    )
    shown = command(first, second).output
    assert "49.96%–63.2%" in shown and "50.0%–" not in shown
    assert "kl is 1.5," in shown and "required ≤ 1" in shown
