"""What pairs are enough for: counts after split and balance, what is short and what would do, and
power.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clean_files import write_rows
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.doctor import forecast_checks
from rlhf_core.config import yaml_text
from rlhf_core.config.data import CollectConfig, DataSource, FileSources, SplitConfig
from rlhf_core.config.loading import PARAMS_FILE, check_params
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import overlaid, overlays_of
from rlhf_core.config.recipe import profiles_of, recipe_folder
from rlhf_core.data.pair_counts import PairLengths
from rlhf_core.data.schema import Demonstration, Message, Preference, PretrainText, Prompt
from rlhf_core.errors import EXIT_OK, EXIT_USER_ERROR, RlhfError
from rlhf_core.forecast import _shortages, as_text, forecast
from rlhf_core.stages import collect
from rlhf_core.stages.pair_supply import DataSupply, supply_of_files, supply_of_workspace
from rlhf_extras.memory.command import PlanRequest


def settings(*sets: str) -> Params:
    """The parameters of the profile own-data with ``sets`` over them."""
    folder = recipe_folder()
    recipe = (folder / PARAMS_FILE).read_text()
    overlays = overlays_of(recipe, profiles_of(folder), "own-data")
    return check_params(
        yaml_text.plain(
            yaml_text.parse(overlaid(recipe, overlays, ("collect.source=files", *sets)), "x")
        )
    )


def pairs(count: int, longer: float = 0.8) -> PairLengths:
    """Pairs of as many prompts, of which a share prefers the longer reply."""
    generator = np.random.default_rng(1)
    sizes = generator.integers(5, 60, count)
    return of_tokens(np.where(generator.random(count) < longer, sizes, -sizes))


def of_tokens(differences: np.ndarray) -> PairLengths:
    """Pairs of as many prompts whose replies differ so in tokens, words and characters alike."""
    groups = [f"g{i}" for i in range(len(differences))]
    return PairLengths.of(groups, 1, np.stack([differences] * 2), differences)


def write(folder: Path, count: int) -> Path:
    """The pairs of a user's file, four of five of which prefer the longer reply."""
    rows = []
    for number in range(count):
        replies = [f"It is {number}, as one sees by counting from one up to it.", f"{number}."]
        chosen, rejected = replies if number % 5 else reversed(replies)
        rows.append(
            json.dumps(
                {
                    "prompt": f"Which number is number {number}?",
                    "chosen": chosen,
                    "rejected": rejected,
                }
            )
        )
    (folder / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    return folder / "pairs.jsonl"


EQUAL_GATE = (
    "gates.reward=[{metric: ece_length_balanced, at_most: 0.15, why: a}, {metric: margin_mean, at_least: 0, why: b}]",
    "validate.split.fewest_balanced=0",
)


def test_a_condition_on_too_few_pairs_names_the_pairs_and_the_share_that_would_do() -> None:
    found = forecast(pairs(3000), settings(*EQUAL_GATE))
    (short,) = found.short
    here = found.counts["reward"]["validation"]
    assert (
        20 < here.balanced < 50
        and "ece_length_balanced" in short
        and f" leave {here.balanced} " in short
    )
    assert (
        found.setting.startswith("validate.split.validation: ") and found.setting in found.refusal
    )
    assert found.more_pairs is not None
    enough = forecast(pairs(3000 + found.more_pairs[1]), settings(*EQUAL_GATE))
    assert not enough.short, "with the pairs that it names the forecast refuses nothing"
    share = found.setting.rpartition(" ")[2]
    moved = forecast(pairs(3000), settings(*EQUAL_GATE, f"validate.split.validation={share}"))
    assert not moved.short and moved.counts["reward"]["validation"].balanced >= 50


@pytest.mark.parametrize(
    ("count", "suffices"), [(60, False), (500, True), (3000, True), (30_000, True)]
)
def test_the_profile_for_own_data_takes_500_pairs_and_says_how_many_60_lack(
    count: int, suffices: bool
) -> None:
    found = forecast(pairs(count), settings())
    assert (not found.refusal) == suffices
    assert found.adapted == (count == 500), (
        "where no test share would do, it takes nothing from training"
    )
    if not suffices:
        assert len(found.short) > 1 and "`rlhf data validate` names" in found.refusal
        assert all(reason in as_text(found) for reason in found.short)
        assert found.more_pairs is not None
        assert not forecast(pairs(count + found.more_pairs[1]), settings()).refusal


def test_more_pairs_of_which_validation_refuses_half_are_twice_as_many() -> None:
    all_kept, half_kept = (forecast(pairs(60), settings(), kept=kept) for kept in (1.0, 0.5))
    assert all_kept.more_pairs and half_kept.more_pairs
    for half, whole in zip(half_kept.more_pairs, all_kept.more_pairs, strict=True):
        assert half == pytest.approx(2 * whole, rel=0.1)


def source(seed: int, count: int, longer: float, replies: int) -> PairLengths:
    """The first pairs of a source, a number of pairs to a prompt, lengths exponential."""
    generator = np.random.default_rng([seed, 7])
    sizes = np.ceil(generator.exponential(30.0, 4000)).astype(np.int64)
    differences = np.where(generator.random(4000) < longer, sizes, -sizes)[:count]
    groups = [f"{seed}-{number // replies}" for number in range(count)]
    return PairLengths.of(groups, 1, np.stack([differences] * 2), differences)


@pytest.mark.parametrize(
    ("longer", "replies"),
    [
        (0.8, 1),
        pytest.param(0.55, 1, marks=pytest.mark.slow),
        pytest.param(0.8, 6, marks=pytest.mark.slow),
    ],
)
def test_what_60_pairs_ask_for_agrees_with_what_150_of_the_same_source_ask_for(
    longer: float, replies: int
) -> None:
    """What few pairs show of their source is uncertain, which is said as a range, not as a number
    that some more of them change by a factor.
    """
    params = settings()
    refused: list[bool] = []
    for seed in (1, 2, 3):
        ranges = []
        for count in (60, 150):
            found = forecast(source(seed, count, longer, replies), params)
            assert found.more_pairs is not None
            few, many = found.more_pairs
            assert (f"about {few:,} to {many:,} more" in found.refusal) == (few < many)
            ranges.append((count + few, count + many))
            for other in range(100, 105):
                fresh = source(other, count + many, longer, replies)
                refused.append(any(_shortages(fresh, params)))
        may_do, will_do = zip(*ranges, strict=True)
        assert max(may_do) <= 1.6 * min(will_do), ranges
    assert np.mean(refused) <= 0.1


def test_too_few_pairs_and_a_shut_data_gate_are_said_at_once() -> None:
    failure = "the data gate failed: half of the rows are copies"
    found = forecast(pairs(60), settings(), failure, kept=0.5)
    assert "more pairs would do" in found.refusal and failure in found.refusal
    few = forecast(pairs(60), settings(), "the data gate failed: there are 60 rows")
    assert few.refusal and "data gate" not in few.refusal


def test_the_test_share_only_shrinks_as_data_grow_so_that_no_pair_goes_from_training_to_test() -> (
    None
):
    config = SplitConfig(fewest_balanced=60)
    few, many = pairs(500), pairs(3000)
    shares = [lengths.adapted(config).test for lengths in (few, many)]
    assert shares[0] > shares[1] == config.test
    tested_later = many.in_split("test", many.adapted(config))[: len(few)]
    trained_before = few.in_split("train", few.adapted(config))
    assert not (tested_later & trained_before).any()


def test_power_grows_with_pairs_and_is_none_where_a_measure_would_be_left_out() -> None:
    powers = []
    for count in (200, 500, 3000):
        found = forecast(pairs(count), settings("validate.split.fewest_balanced=0"))
        powers.append({power.metric: power.power for power in found.powers})
    for metric in powers[0]:
        assert powers[0][metric] <= powers[1][metric] + 0.05 <= powers[2][metric] + 0.1, metric
    assert powers[0]["test_accuracy_length_balanced"] == 0.0
    assert powers[2]["test_accuracy_length_balanced_low95"] > 0.95


def test_a_simulated_reward_model_passes_as_often_as_its_power_says() -> None:
    found = forecast(pairs(500), settings())
    power = next(power for power in found.powers if power.metric == "test_accuracy_length_balanced")
    right = np.random.default_rng(2).binomial(power.measured_on, 0.7, 20_000)
    assert (right / power.measured_on >= 0.6).mean() == pytest.approx(power.power, abs=0.01)


def test_init_refuses_60_pairs_with_the_number_that_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 60)
    with pytest.raises(
        RlhfError,
        match=r"60 pairs do not suffice: .*; about [\d,]+( to [\d,]+)? more pairs would do; nothing was made",
    ):
        CliRunner().invoke(app, ["init", "run", "--data", "pairs.jsonl"], catch_exceptions=False)
    assert not (tmp_path / "run").exists()


def test_files_are_counted_as_collect_reads_them_each_pair_once(tmp_path: Path) -> None:
    file = write(tmp_path, 80)
    (tmp_path / "again.jsonl").write_text(file.read_text())
    params = settings('collect.files.preferences=["pairs.jsonl"]')

    def count(*sources: DataSource, **changes: Any) -> int | None:
        config = CollectConfig(source="files", files=FileSources(preferences=sources), **changes)
        found = supply_of_files(tmp_path, params.model_copy(update={"collect": config})).pairs
        return None if found is None else found.pairs

    named = DataSource(path="pairs.jsonl")
    assert count(named, DataSource(path="again.jsonl")) == 80
    assert count(DataSource(path="pairs.jsonl", cap=30)) == 30
    assert count(DataSource(path="hub:a/b")) is None
    (tmp_path / "data" / "annotations").mkdir(parents=True)
    pair = {"prompt": "Which is it?", "chosen": "this", "rejected": "that"}
    (tmp_path / "data" / "annotations" / "mine.jsonl").write_text(json.dumps(pair) + "\n")
    assert count(named) == 81, "annotated pairs join them"


def test_clean_pairs_count_only_while_they_are_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, 80)
    params = settings('collect.files.preferences=["pairs.jsonl"]')
    assert pairs_of(tmp_path, params) == 80, "what is refused is not known before validation"
    collect.collect(params.collect, tmp_path, tmp_path / "data" / "raw")
    kept = [
        Preference(str(n), [Message("user", f"{n}?")], "a", "b", None, "", "files", f"g{n}")
        for n in range(10)
    ]
    for user in ("preferences", "preferences_referee", "preferences_judge"):
        for split in ("train", "validation", "test"):
            write_rows(tmp_path / "data" / "clean" / user / f"{split}.parquet", kept)
    turns = [Message("user", "1?")]
    others = [
        Demonstration("1", turns, "a", "", "files", "g1"),
        Prompt("1", turns, "", "files", "g1"),
        PretrainText("1", "a", "", "files", "g1"),
    ]
    for row in others:
        for split in ("train", "validation", "test"):
            write_rows(tmp_path / "data" / "clean" / row.KIND / f"{split}.parquet", [row])
    assert pairs_of(tmp_path, params) == 70, "of test pairs, which are common, one folder counts"
    write(tmp_path, 200)
    assert pairs_of(tmp_path, params) == 200, "the user has added pairs, as he was told"


def test_settings_on_trial_are_answered_by_the_files_and_not_by_the_clean_data_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DataSupply(refusal="the workspace's clean data")
    files = DataSupply(refusal="the files")
    monkeypatch.setattr("rlhf_extras.memory.command.supply_of_workspace", lambda *_: own)
    monkeypatch.setattr("rlhf_extras.memory.command.supply_of_files", lambda *_: files)
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    for assignment in ("ppo.iterations=7", "sft.steps=9"):
        assert PlanRequest(tmp_path, sets=[assignment]).supply is own, assignment
    for assignment in ("validate.split.validation=0.3", "seed=2", "collect.limit=10"):
        assert PlanRequest(tmp_path, sets=[assignment]).supply is files, assignment


def pairs_of(workspace: Path, params: Params) -> int:
    found = supply_of_workspace(workspace, params).pairs
    assert found is not None
    return found.pairs


@pytest.mark.parametrize(
    ("count", "level"),
    [
        (60, "fail"),
        pytest.param(500, "warn", marks=pytest.mark.slow),
        pytest.param(1500, "ok", marks=pytest.mark.slow),
    ],
)
def test_init_doctor_and_plan_say_the_same(
    count: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, count)
    params = settings('collect.files.preferences=["pairs.jsonl"]')
    found = supply_of_workspace(tmp_path, params).pairs
    checks = forecast_checks(tmp_path, params, probe=False)
    (check,) = [one for one in checks if one.name == "pairs"]
    assert found is not None and (check.level, check.finding) == (level, found.conclusion)
    made = CliRunner().invoke(app, ["init", "run", "--data", "pairs.jsonl"])
    assert found.exit_code == (EXIT_USER_ERROR if level == "fail" else EXIT_OK)
    if level == "fail":
        assert f"{found.conclusion}; nothing was made" in str(made.exception)
    else:
        assert as_text(found) in made.stdout
        run = tmp_path / "run"
        assert supply_of_workspace(run, PlanRequest(run).params).pairs == found


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "world"])
def test_data_validate_says_it_as_init_would(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a workspace of the synthetic world too, whose settings are not those that files get."""
    (tmp_path / "world").mkdir()
    for name in (PARAMS_FILE, "dvc.yaml"):
        (tmp_path / "world" / name).write_text((recipe_folder() / name).read_text())
    monkeypatch.chdir(tmp_path / folder)
    write(Path.cwd(), 500)
    found = supply_of_workspace(
        Path.cwd(), settings('collect.files.preferences=["pairs.jsonl"]')
    ).pairs
    assert found is not None
    told = CliRunner().invoke(app, ["data", "validate", "pairs.jsonl"])
    assert told.exit_code == found.exit_code == 0 and as_text(found) in told.stdout


def test_pairs_of_equal_length_are_trained_on_though_they_measure_nothing() -> None:
    equal = of_tokens(np.zeros(400, dtype=np.int64))
    found = forecast(equal, settings("gates.reward=[{metric: accuracy, at_least: 0.5, why: a}]"))
    assert not found.refusal and found.counts["reward"]["test"].balanced == 0
    assert "test_accuracy_length_balanced" in forecast(equal, settings()).refusal
