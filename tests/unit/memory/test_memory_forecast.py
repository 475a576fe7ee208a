"""The line of memory before a run: by the rows of the files that settings name, in the same words in
every command, and with what would make the run fit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from plugin_distributions import Install
from typer.testing import CliRunner
from unit.stages.test_prompt_room import WITHOUT_PAIRS, save_model, settings, text, write_pairs

from flows.cli import app
from flows.commands.doctor import DoctorCheck, forecast_checks
from flows.commands.machine_checks import OK, WARN
from rlhf_core.config.params import Params
from rlhf_core.plugins import DISTRIBUTION, FORECASTS, plugins_of
from rlhf_core.stages.pair_supply import DataSupply, supply_of_files
from rlhf_core.stages.run_forecasts import run_forecasts
from rlhf_extras.memory import forecast as memory
from rlhf_extras.memory.command import PlanRequest
from rlhf_extras.memory.forecast import memory_of_run
from rlhf_extras.memory.sharding import GIB

LIMITS = "the limits of the settings"
ROWS = "the rows of the files"
POSITIONS = 8192
ONE_AT_A_TIME = "flow.parallel=1"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model of many positions, and pairs that are short beside them."""
    save_model(tmp_path / "model", POSITIONS)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    write_pairs(tmp_path / "pairs.jsonl", 300, long_replies=3)
    return tmp_path


@pytest.fixture
def entered(install: Install) -> None:
    """The line at its door, also in a checkout that was installed before it had this one."""
    if "memory" not in plugins_of(FORECASTS):
        target = "rlhf_extras.memory.forecast:memory_of_run"
        install("memory_line", FORECASTS, {"memory": target})


def has(monkeypatch: pytest.MonkeyPatch, available: float, total: float | None = None) -> None:
    """Let the machine have so many GiB."""
    monkeypatch.setattr(memory, "available_memory", lambda: round(available * GIB))
    monkeypatch.setattr(memory, "total_memory", lambda: round((total or available) * GIB))


def plan_of(place: Path, *words: str) -> dict[str, Any]:
    command = ["plan", "--workspace", str(place), "--no-probe", "--json", *words]
    document: dict[str, Any] = json.loads(CliRunner().invoke(app, command).stdout)
    return document


def memory_check(place: Path, params: Params) -> list[DoctorCheck]:
    found = forecast_checks(place, params, probe=False)
    return [check for check in found if check.name == "memory"]


@pytest.mark.dear("two forecasts and two plans")
def test_before_a_run_the_rows_of_the_files_are_planned_with(place: Path) -> None:
    settings(place, "model")
    by_rows = plan_of(place, "--stage", "ppo")
    assert by_rows["lengths"] == ROWS
    assert by_rows["memory"]["fits"] and by_rows["memory"]["lengths"] == ROWS
    (place / "pairs.jsonl").rename(place / "elsewhere.jsonl")
    by_limits = plan_of(place, "--stage", "ppo")
    assert by_limits["lengths"].startswith(LIMITS)
    assert by_rows["peak"] < by_limits["peak"] / 3


@pytest.mark.dear("three forecasts")
def test_settings_of_the_command_line_are_planned_with_the_rows_that_they_leave(
    place: Path,
) -> None:
    settings(place, "model")
    longest = PlanRequest(place, sets=["ppo.batch_size=8"])._lengths(settings(place, "model"), None)
    assert longest.source == ROWS and longest.ptx.width > 400
    short = "validate.max_reply_chars=200"
    shorter = PlanRequest(place, sets=[short])._lengths(settings(place, "model", short), None)
    assert shorter.source == ROWS and shorter.ptx.width < 300


def test_the_longest_rows_are_those_that_the_stages_train_on(place: Path) -> None:
    params = settings(place, "model")
    rows = supply_of_files(place, params).lengths
    assert rows is not None and rows.source == ROWS and not rows.unread
    found = memory.lengths_of_rows(rows, params, POSITIONS)
    assert found.prompt < found.pairs.width <= params.reward.max_tokens
    assert found.demonstrations.width <= params.sft.max_tokens < 400 < found.ptx.width < 1000
    assert not found.is_bound


def test_rows_that_are_not_here_count_by_the_limits(place: Path) -> None:
    files = "collect.files={preferences: [pairs.jsonl], prompts: ['hub:some/prompts']}"
    params = settings(place, "model", files)
    rows = supply_of_files(place, params).lengths
    assert rows is not None and rows.unread == {"prompts"}
    found = memory.lengths_of_rows(rows, params, POSITIONS)
    assert found.is_bound and found.prompt > 5000 and found.ptx.width < 1000
    assert found.source.startswith(f"{ROWS}; prompts from {LIMITS}")


@pytest.mark.dear("three plans")
def test_a_machine_that_is_too_small_is_a_warning_with_settings_by_which_it_fits(
    place: Path, monkeypatch: pytest.MonkeyPatch, entered: None
) -> None:
    params = settings(place, "model")
    has(monkeypatch, 64)
    (fits,) = memory_check(place, params)
    assert fits.level == OK and not fits.remedy
    assert re.search(
        r"most: about [\d.]+ GiB of the 64.0 GiB of memory available here", fits.finding
    )
    supply = supply_of_files(place, params)
    whole = memory_of_run(place, params, supply)
    assert whole is not None and whole.details["stages"] == ["judge", "ppo"]
    alone = plan_of(place, "--stage", "ppo", "--set", ONE_AT_A_TIME)["memory"]["needed"] / GIB
    has(monkeypatch, alone + 0.1)
    (too_large,) = memory_check(place, params)
    assert too_large.level == WARN and "judge and ppo at once need" in too_large.finding
    assert too_large.remedy.startswith(f"set {ONE_AT_A_TIME} (then")
    has(monkeypatch, 0.95 * alone, total=64)
    (small,) = memory_check(place, params)
    assert small.remedy.startswith("close other programs, or set ")
    advised = small.remedy.partition("set ")[2].partition(" (then")[0].split()
    assert ONE_AT_A_TIME in advised and len(advised) > 1
    (helped,) = memory_check(place, settings(place, "model", *advised))
    assert helped.level == OK, helped


@pytest.mark.dear("every setting is tried")
def test_where_no_setting_helps_that_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = settings(place, "model", "ppo.reward.sources=[{kind: model}]")
    has(monkeypatch, 0.1)
    line = memory_of_run(place, params, supply_of_files(place, params))
    assert line is not None and not line.details["fits"]
    assert line.remedy == "take a smaller model or more memory: no setting makes it fit"


@pytest.mark.dear("every setting is tried")
@pytest.mark.parametrize("named", [24, 0.001])
def test_a_gpu_that_settings_name_goes_before_this_machine(
    named: float, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, 0.1)
    params = settings(place, "model", f"plan.gpu_memory_gb={named}")
    line = memory_of_run(place, params, supply_of_files(place, params))
    assert line is not None and f"a GPU of {named:g} GiB" in line.conclusion
    assert line.details["fits"] == (named == 24)


@pytest.mark.dear("a plan of 135 million parameters")
def test_without_the_models_tokenizer_limits_alarm_nobody(
    place: Path, monkeypatch: pytest.MonkeyPatch, entered: None
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", pytest.fail)
    has(monkeypatch, 8)
    unknown = settings(place, "someone/unknown-model")
    assert not memory_check(place, unknown), "its sizes are not here, and nothing is fetched"
    named = settings(place, "HuggingFaceTB/SmolLM2-135M-Instruct")
    (check,) = memory_check(place, named)
    assert check.level == OK and not check.remedy
    assert re.search(rf"not known: .* at most \d\d.* GiB, by {LIMITS}", check.finding)
    has(monkeypatch, 1000)
    (enough,) = memory_check(place, named)
    assert "at most" in enough.finding and "1000.0 GiB" in enough.finding


def test_a_folder_with_a_tokenizer_alone_has_no_sizes(place: Path) -> None:
    (place / "model" / "config.json").unlink()
    assert memory_of_run(place, settings(place, "model"), DataSupply()) is None


@pytest.mark.dear("two forecasts and a plan")
def test_a_run_without_pairs_has_its_line_too(
    place: Path, monkeypatch: pytest.MonkeyPatch, entered: None
) -> None:
    rows = [{"prompt": f"{text(n, 30)} {n}", "answer": "1"} for n in range(100)]
    (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = settings(place, "model", *WITHOUT_PAIRS)
    has(monkeypatch, 64)
    (check,) = memory_check(place, params)
    assert check.level == OK and " takes most: about " in check.finding
    document = plan_of(place)
    assert document["lengths"] == document["memory"]["lengths"] == ROWS
    assert check.finding == document["memory"]["conclusion"]


@pytest.mark.slow
def test_init_doctor_plan_and_validate_say_it_in_the_same_words(
    place: Path, monkeypatch: pytest.MonkeyPatch, entered: None
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("RLHF_PROBE", "0")
    write_pairs(place / "pairs.jsonl", 1500)
    runner = CliRunner(env={"COLUMNS": "300"})
    for available in (64, 0.9):
        has(monkeypatch, available)
        lines = []
        data = ["--model", "model", "--data", "pairs.jsonl"]
        for words in (
            ["init", f"run-{available}", *data],
            ["plan", "--workspace", f"run-{available}"],
            ["data", "validate", "pairs.jsonl", "--tokenizer", "model"],
        ):
            said = runner.invoke(app, words)
            assert said.exit_code == 0, said.exception or said.stdout
            lines += re.findall(r"^forecast of memory: (.*)$", said.stdout, re.MULTILINE)
        run = place / f"run-{available}"
        (check,) = memory_check(run, PlanRequest(run).params)
        lines.append("; ".join(filter(None, (check.finding, check.remedy))))
        assert len(lines) == 4 and len(set(lines)) == 1, lines
        assert (check.level == WARN) == (available < 1)


def test_without_the_extra_nothing_is_said_and_nothing_missed(
    place: Path, install: Install
) -> None:
    install(DISTRIBUTION.replace("-", "_"), "other.group", {"a": "b"})  # found first, and alone
    params = settings(place, "model")
    checks = [*forecast_checks(place, params, probe=False)]
    assert [check.name for check in checks] == ["pairs"]
    assert run_forecasts(place, params, DataSupply()) == {}


def test_a_forecast_that_fails_costs_its_own_line(install: Install, tmp_path: Path) -> None:
    module = "def broken(*given): raise SystemExit('no cloud')\ndef silent(*given): return None\n"
    entries = {"broken": "cloud:broken", "silent": "cloud:silent", "gone": "nowhere:line"}
    install("clouds", FORECASTS, entries, cloud=module)
    lines = run_forecasts(tmp_path, Params(), DataSupply())
    assert "silent" not in lines and not lines["broken"].remedy
    assert lines["broken"].conclusion == "it is left out: no cloud"
    assert "clouds" in lines["gone"].conclusion
