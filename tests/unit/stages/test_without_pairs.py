"""A workspace of prompts and a reward function: what params.yaml refuses, what is left out, what
stages do without.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

from flows.dvc_repo.inputs import OPTIONAL, with_sources
from flows.registry.register import registrable_models
from rlhf_core.api.checker import Checker
from rlhf_core.config import yaml_text
from rlhf_core.config.data import CollectConfig, FileSources, ValidateConfig
from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import check_params
from rlhf_core.config.operations import RegistryConfig
from rlhf_core.config.params import Params
from rlhf_core.config.profiles import merge, overridden
from rlhf_core.config.reward_sources import FunctionSource
from rlhf_core.data.collection.rows import read_records
from rlhf_core.data.row_counts import Record
from rlhf_core.data.schema import Message, Prompt, columns_of_prompts, read_rows
from rlhf_core.errors import ConfigError, DataError, GateFailed
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets
from rlhf_core.evaluation.promotion import win_rate_criteria
from rlhf_core.evaluation.replies import Reply
from rlhf_core.stages import collect, validate
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.stages.runtime.runner import load_stage, outputs_of, run_stage
from rlhf_core.storage.files import read_json
from rlhf_core.training.run_context import RunContext

FUNCTION = {"kind": "function", "target": "checks:score"}
CHECKER = merge(
    (ROOT / "params.yaml").read_text(), [("profile checker", (ROOT / "profiles" / "checker.yaml").read_text())],
    ['collect.files.prompts=["p.jsonl"]', f"ppo.reward.sources={json.dumps([FUNCTION])}"],
)  # fmt: skip
SCORE = "def score(prompts, replies, answer):\n    return [float(r == a) for r, a in zip(replies, answer)]\n"


def params(**changes: Any) -> Params:
    return check_params(
        overridden(yaml_text.plain(yaml_text.parse(CHECKER, "params.yaml")), changes)
    )


@pytest.mark.parametrize("name", ["reward", "referee", "judge", "gate-reward", "gate-sft"])
def test_a_stage_that_the_workspace_does_without_is_refused_with_those_that_it_has(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "params.yaml").write_text(CHECKER)
    with pytest.raises(
        ConfigError,
        match=rf"trains without pairs and has no stage '{name}'; it has collect, validate, base, sft, "
        "critic, ppo, evaluate, gate-policy, report$",
    ):
        run_stage(name, tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ppo.reward.sources": [{"kind": "model"}]}, "kind model"),
        ({"ppo.reward.sources": [FUNCTION, {"kind": "http", "url": "http://127.0.0.1/s"}]}, "kind http"),
        ({"policy.method": "dpo"}, "policy.method dpo"),
        ({"ppo.selection.method": "referee"}, "selection.method last"),
        ({"ppo.ptx.weight": 0.3}, "collect.files names no texts"),
        ({"evaluate.best_of_n": 4}, "best_of_n"),
        ({"collect.source": "world"}, "synthetic world makes pairs"),
        ({"collect.files.preferences": ["pairs.jsonl"]}, "pairs.jsonl"),
        (
            {"gates.policy": [{"metric": "comparison.judge.win_rate", "at_least": 0.5, "why": "w"}]},
            "there is no judge",
        ),
        ({"gates.policy": [{"metric": "ppo.last.reward_mean", "at_least": 0.5, "why": "w"}]}, "comparison.checker"),
        (
            {"ppo.advantage.estimator": "gae", "critic.init": "reward", "ppo.critic_optimizer": {"lr": 1e-3}},
            "critic.init sft",
        ),
    ],
)  # fmt: skip
def test_what_needs_pairs_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        params(**changes)
    assert named in str(refused.value)


def test_a_reward_gate_is_null_without_pairs_alone() -> None:
    assert params().gates.reward is None
    document = yaml_text.plain(yaml_text.parse((ROOT / "params.yaml").read_text(), "params.yaml"))
    with pytest.raises(ConfigError, match=r"gates\.reward is null"):
        check_params(overridden(document, {"gates.reward": None}))


def stages_of(text: str) -> dict[str, Any]:
    return dict(yaml_text.plain(yaml_text.parse(text, "dvc.yaml"))["stages"])


def test_stages_for_pairs_leave_the_graph_and_come_back(tmp_path: Path) -> None:
    whole = (ROOT / "dvc.yaml").read_text()
    cut = with_sources(whole, params(), tmp_path)
    stages = stages_of(cut)
    assert not stages.keys() & {*OPTIONAL} and {"sft", "critic", "ppo", "evaluate"} <= stages.keys()
    read = {dep for stage in stages.values() for dep in stage["deps"]}
    gone = (
        "models/reward",
        "models/referee",
        "models/judge",
        "gates/reward.pass",
        "gates/sft.pass",
    )
    assert not read.intersection(gone) and not any("referee" in path for path in read)
    assert with_sources(cut, params(), tmp_path) == cut
    with_demonstrations = params(**{"collect.files.demonstrations": ["d.jsonl"]})
    assert "gate-sft" in stages_of(with_sources(cut, with_demonstrations, tmp_path))
    back = stages_of(
        with_sources(
            cut, check_params(yaml_text.parse((ROOT / "params.yaml").read_text(), "p")), ROOT
        )
    )
    expected = stages_of(whole)
    assert back.keys() == expected.keys()
    for name, stage in expected.items():
        assert {*back[name]["deps"]} == {*stage["deps"]}, name


def test_the_paths_that_are_left_out_are_those_that_the_stages_write() -> None:
    for name in OPTIONAL:
        assert outputs_of([name]) == {*load_stage(name).outputs.values()}


def test_only_the_policy_is_registered_and_by_the_gates_there_are() -> None:
    (policy,) = registrable_models(RegistryConfig(), params().left_out)
    assert (policy.kind, policy.gates) == ("policy", ("data", "policy"))
    assert [model.kind for model in registrable_models(RegistryConfig())] == ["reward", "policy"]


RECORDS = [
    {"prompt": "2 + 3 =", "answer": "5", "made": {"by": [1, 2]}},
    {"prompt": "4 + 4 =", "answer": None},
    {"prompt": "9 + 1 ="},
]


def test_columns_beside_a_prompt_are_kept_as_they_are() -> None:
    read = read_records(
        [Record(n, record) for n, record in enumerate(RECORDS, 1)], "prompts", "p.jsonl"
    )
    rows = [Prompt(row["id"], [], "", "", "", row["columns"]) for row in read.rows]
    assert columns_of_prompts(rows) == {
        "answer": ["5", None, None],
        "made": [{"by": [1, 2]}, None, None],
    }
    assert not read.counts.unused


def collected(
    folder: Path, records: list[dict[str, Any]], **config: Any
) -> tuple[Path, ValidateConfig]:
    (folder / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = CollectConfig(source="files", pairs=False, files=FileSources(prompts=("p.jsonl",)))  # type: ignore[arg-type]
    outputs = Paths({"raw": folder / "data" / "raw"})
    collect.run(settings, Paths(), outputs, RunContext(folder / "work"))
    return folder, ValidateConfig(**config)


def validated(folder: Path, config: ValidateConfig) -> Path:
    outputs = Paths({name: folder / path for name, path in validate.STAGE.outputs.items()})
    inputs = Paths({"raw": folder / "data" / "raw", "expectations": ROOT / "expectations"})
    validate.run(config, inputs, outputs, RunContext(folder / "work"))
    return outputs.clean


def test_columns_reach_the_clean_data_and_no_pairs_are_missed(tmp_path: Path) -> None:
    records = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(80)]
    clean = validated(*collected(tmp_path, records))
    rows = [
        row
        for split in ("train", "validation", "test")
        for row in read_rows(clean / "prompts" / f"{split}.parquet", Prompt)
    ]
    answers = dict(
        zip(
            [row.prompt[-1].content for row in rows],
            columns_of_prompts(rows)["answer"],
            strict=True,
        )
    )
    assert answers == {record["prompt"]: record["answer"] for record in records}
    metrics = {row["metric"] for row in read_json(tmp_path / "gates" / "data.json")["conditions"]}
    assert "prompts.test" in metrics and not any(name.startswith("preferences") for name in metrics)


def test_prompts_of_which_none_are_held_out_fail_the_data_gate(tmp_path: Path) -> None:
    folder, config = collected(tmp_path, [{"prompt": f"{n}?"} for n in range(4)], min_rows=1)
    with pytest.raises(GateFailed, match=r"prompts\.(test|validation)"):
        validated(folder, config)


def test_nothing_to_reply_to_is_refused(tmp_path: Path) -> None:
    config = CollectConfig(source="files", pairs=False)
    with pytest.raises(DataError, match="neither prompts nor demonstrations"):
        collect.run(
            config, Paths(), Paths({"raw": tmp_path / "data" / "raw"}), RunContext(tmp_path)
        )


def asked(*answers: str | None) -> list[Prompt]:
    return [
        Prompt(str(n), [Message("user", f"{n}?")], "", "p", f"g{n}", json.dumps({"answer": answer}))
        for n, answer in enumerate(answers)
    ]


def checker(folder: Path, code: str, prompts: list[Prompt], *weights: float) -> Checker:
    module = f"own_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(code)
    sources = [
        FunctionSource(target=f"{module}:score", weight=weight) for weight in weights or (1.0,)
    ]
    return Checker(tuple(sources), prompts, folder)


def reply(text: str) -> Reply:
    return Reply(text, True, (1,), "v")


def test_each_reply_is_checked_against_the_columns_of_its_own_prompt(tmp_path: Path) -> None:
    prompts = asked("a", "b", "c")
    judge = checker(tmp_path, SCORE, prompts, 1.0, 0.5)
    turns = [prompts[n].prompt for n in (2, 0, 2)]
    assert judge.score(turns, [reply("c"), reply("b"), reply("a")]) == [1.5, 0.0, 0.0]


def test_a_column_that_no_prompt_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="solution"):
        checker(tmp_path, "def score(prompts, replies, solution):\n    return []\n", asked("a"))


def test_a_module_that_is_not_in_the_workspace_is_refused(tmp_path: Path) -> None:
    source = FunctionSource(target="nowhere_to_be_found:score")
    with pytest.raises(ConfigError, match="nowhere_to_be_found"):
        Checker((source,), asked("a"), tmp_path)


def test_what_cannot_be_scored_counts_as_the_lowest_score(tmp_path: Path) -> None:
    code = "def score(prompts, replies, answer):\n    return [None if r == '?' else float(r) for r in replies]\n"
    prompts = asked(*"aaaa")
    judge = checker(tmp_path, code, prompts)
    before = EvaluatedModel([reply(text) for text in ("1", "?", "2", "-3")])
    after = EvaluatedModel([reply(text) for text in ("2", "?", "?", "1")])
    evaluation = Evaluation(FixedSets(prompts), before, after, EvaluateConfig(bootstrap=50))
    evaluation.score(judge)
    assert after.scores["checker"] == [2.0, -3.0, -3.0, 1.0]
    assert evaluation.unscored == {"sft": 0.25, "policy": 0.5}
    assert evaluation.comparison["checker"]["win_rate"] == 0.625
    assert math.isclose(evaluation.comparison["checker"]["mean_difference"], 0.0)
    assert [row["policy_reply"] for row in evaluation.bad_cases("checker")] == ["?"]
    assert evaluation.losses()["missing_ends"]["loss"] == 0.0


def test_a_checker_promotes_without_a_rate_at_equal_lengths() -> None:
    rates = {"win_rate": 0.7, "win_rate_low95": 0.6, "lc_win_rate_low95": 0.0}
    compared = rates | {"clusters": 20, "clusters_won": 20}
    match = {"comparison": {"checker": compared | {"clusters_tied": 0, "clusters_lost": 0}}}
    assert all(criterion.passed for criterion in win_rate_criteria(match, 0.5, 0.05, 1))
    assert not all(
        c.passed
        for c in win_rate_criteria(
            {"comparison": {"judge": match["comparison"]["checker"]}}, 0.5, 0.05, 1
        )
    )
