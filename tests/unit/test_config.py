"""A user's wrong parameter gives one clear line with its path and the nearest valid name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlhf_core.config import yaml_text
from rlhf_core.config.base import SftConfig
from rlhf_core.config.health import DEFAULT_RULES, rules_for
from rlhf_core.config.loading import check_params, load_section
from rlhf_core.config.model import OfKind
from rlhf_core.config.params import Params
from rlhf_core.config.paths import rebase_sources
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.profiles import (
    merge,
    overlaid,
    parse_assignment,
    profile_text,
    workspace_name,
)
from rlhf_core.config.reward_sources import DEFAULT_SOURCES, source_names
from rlhf_core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BASE = "seed: 3\nsft:\n  steps: 5  # few\n  optimizer:\n    lr: 1e-3\n"


def gated(metric: str, **bound: object) -> dict:
    """Parameters whose policy gate asks for one metric."""
    return {"gates": {"policy": [{"metric": metric, "why": "x", **bound}]}}


NO_SAFETY = {"collect": {"source": "files"}, "evaluate": {"safety": {"prompts": 0}}}


def told(**rules: dict) -> dict:
    return {"ppo": {"health": {"rules": rules}}}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"sft": {"stepz": 3}}, "unknown parameter 'sft.stepz'; did you mean 'sft.steps'?"),
        ({"pppo": {}}, "unknown parameter 'pppo'; did you mean 'ppo'?"),
        ({"sft": {"lr": 1}}, "unknown parameter 'sft.lr'; did you mean 'sft.optimizer.lr'?"),
        ({"ppo": {"lr": 1}}, "parameter 'ppo.lr'; did you mean 'ppo.policy_optimizer.lr' or 'ppo.critic_optimizer.lr'?"),
        ({"validate": {"split": {"x": 1}}}, "'validate.split.x'; known names: fewest_balanced, judge, most_test"),
        ({"ppo": {"kl": {"coeficient": 0.1}}}, "unknown parameter 'ppo.kl.coeficient'; did you mean 'ppo.kl.coefficient'?"),
        ({"sft": {"steps": "ten"}}, "parameter 'sft.steps': input should be a valid integer (got 'ten')"),
        ({"collect": {"files": {"preferences": "a.jsonl"}}}, "input should be a list, such as [a, b] (got"),
        ({"validate": {"languages": "en"}}, "'validate.languages': input should be a list, such as [a, b] (got 'en')"),
        ({"ppo": None}, "parameter 'ppo': input should be a mapping of settings, such as {a: 1} (got None)"),
        ({"reward": {"category_shares": 3}}, "'reward.category_shares': input should be a mapping, such"),
        ({"sft": {"steps": -1}}, "parameter 'sft.steps': input should be greater than or equal to 0 (got -1)"),
        ({"ppo": {"kl": {"coefficient": float("inf")}}}, "'ppo.kl.coefficient': input should be a finite number"),
        ({"sft": {"optimizer": {"lr": float("inf")}}}, "'sft.optimizer.lr': input should be a finite number (got inf)"),
        ({"gates": {"policy": [{"metric": "kl", "why": "x", "at_most": float("nan")}]}}, "should be a finite number"),
        *(
            ({"registry": {key: name}}, f"parameter 'registry.{key}': a registered model's name has a letter or digit")
            for key in ("policy", "reward_model")
            for name in ("team/policy", "team:policy", "bob's", "", "..", "a\nb")
        ),
        ({"registry": {"policy": "m", "reward_model": "m"}}, "policy and reward_model are both m: each needs a name"),
        ({"seed": 2**63}, "parameter 'seed': input should be less than 9223372036854775808"),
        ({"ppo": {"kl": {"estimator": "k3"}}}, "does not give the gradient of the KL"),
        ({"ppo": {"batch_size": 63}}, "batch_size 63 is not a multiple of minibatches 2"),
        ({"pools": {"ppo": {"pool": "g", "gpuz": 1}}}, "unknown parameter 'pools.ppo.gpuz'; did you mean 'pools.ppo.gpus'?"),
        ({"pools": {"ppo": {"pool": "g", "memory": "64 GB"}}}, "write a quantity as Kubernetes does, such as 64Gi"),
        ({"pools": {"ppo": 3}}, "name a work pool, or give a mapping with pool"),
        ({"pools": {"ppo": {"pool": "g", "gpus": 1, "variables": {"gpus": 2}}}}, "variables repeats gpus, which has a"),
        ({"pools": {"ppo": {"pool": "g", "remote": "store"}}}, "remote is for workers that do not see the workspace"),
        ({"pools": {"sft": "g", "ppo": {"pool": "g", "shared": False}}}, "workers see the workspace or they do not"),
        ({"work_pools": {"g": {"queue": {}}}}, "'work_pools.g.queue'; did you mean 'work_pools.g.queues'?"),
        ({"ppo": {"critic_mode": "shared"}, "critic": {"init": "reward"}}, "the value head sits on the policy"),
        ({"ppo": {"min_new_tokens": 20}, "evaluate": {"max_new_tokens": 20}}, "no reply of the evaluation could end"),
        ({"gates": {"policy": [{"metric": "kl", "why": "x"}]}}, "give exactly one of at_least, at_most, at_most_of"),
        (gated("policy.safety.answers_benign", at_most=1), "safety.prompts are not asked in the synthetic world"),
        (NO_SAFETY | gated("kl", at_most_of="sft.safety.answers_benign"), "evaluate.safety.prompts is 0: take the"),
        ({"evaluate": {"perplexity": {"rows": 0}}} | gated("policy.perplexity_pretrain", at_most=9.0),
         "asks for policy.perplexity_pretrain, but evaluate.perplexity.rows is 0"),
        (gated("policy.multiple_choice.accuracy", at_least=0), "evaluate.multiple_choice is not set"),
        (gated("opponents.other.policy.comparison.judge.win_rate", at_least=0.5), "evaluate.opponents is not set"),
        ({"compute": {"launch": {"evaluate": {"processes": 2, "engine": "deepspeed"}}}}, "frozen to sharded"),
        ({"compute": {"launch": {"evaluate": {"processes": 2, "frozen": "offload"}}}}, "frozen to sharded"),
        ({"compute": {"launch": {"evaluate": {"processes": 2, "gradient_checkpointing": True}}}}, "gradient_checkpo"),
        (told(kl_runawy={}), "health rule 'ppo.health.rules.kl_runawy'; did you mean 'ppo.health.rules.kl_runaway'?"),
        (told(kl_runaway={"actoin": "warn"}), "actoin'; did you mean 'ppo.health.rules.kl_runaway.action'?"),
        (told(kl_runaway={"action": "stop"}), "should be 'ignore', 'warn', 'pause' or 'rollback' (got 'stop')"),
        (told(kl_runaway={"threshold": "2"}), "must be a number, or a mapping from a check's metric to a number"),
        (told(kl_runaway={"window": 0}), "'ppo.health.rules.kl_runaway.window': input should be greater than 0"),
        (told(kl_runaway={"adjust": {"rl": 0.5}}), "adjust.rl'; did you mean 'ppo.health.rules.kl_runaway.adjust.lr'?"),
        (told(length_growing={"threshold": 2}), "2 checks; write it as {length: …, reward_length_correlation: …}"),
        (told(length_growing={"threshold": {"kl": 2}}), "no check 'kl'; known names: length, reward_length_corr"),
        (told(length_at_limit={"threshold": {"length": 2}}), "no check 'length'; did you mean 'length of start'?"),
        (told(loss_not_finite={"threshold": 2}), "has no threshold"),
        (told(kl_negative={"action": "rollback"}), "the rule names nothing that a rollback changes"),
        (told(kl_runaway={"action": "rollback", "adjust": {}}), "would only repeat what failed"),
        ({"ppo": {"kl": {"coefficient": 0.0}, "health": {"rules": {"kl_runaway": {
            "action": "rollback", "adjust": {"kl_coefficient": 2.0}}}}}}, "it multiplies a KL coefficient of 0"),
        ({"ppo": {"health": {"max_rollbacks": 0, "rules": {"kl_runaway": {"action": "rollback"}}}}},
         "max_rollbacks 0 could only pause"),
    ],
)  # fmt: skip
def test_problems_are_told_with_path_and_remedy(document: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_params(document)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def sections(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of a setting of each section: the first one that holds no section itself."""
    plain = []
    for name, field in model.model_fields.items():
        key, annotation = field.alias or name, field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if not issubclass(annotation, OfKind):  # without a kind nothing else is looked at
                yield from sections(annotation, (*path, key))
        else:
            plain.append(key)
    if plain:
        yield (*path, plain[0])


@pytest.mark.parametrize("path", list(sections(Params)), ids=".".join)
def test_a_misspelt_setting_is_suggested_as_it_is_typed_in_every_section(
    path: tuple[str, ...], tmp_path: Path
) -> None:
    """In params.yaml, in ``--set`` and profiles, which are laid over it, and in one section alone."""
    *above, name = path
    wrong = ".".join([*above, f"{name}z"])
    told = f"unknown parameter '{wrong}'; did you mean '{'.'.join(path)}'?"
    document = yaml_text.plain(yaml_text.parse(overlaid("seed: 1\n", sets=[f"{wrong}=1"]), "x"))
    with pytest.raises(ConfigError) as caught:
        check_params(document)
    assert told in str(caught.value)
    if above:
        section = Params.model_fields[
            next(
                key for key, field in Params.model_fields.items() if above[0] in (key, field.alias)
            )
        ].annotation
        (tmp_path / "params.yaml").write_text(json.dumps(document))
        with pytest.raises(ConfigError) as caught:
            load_section(tmp_path, above[0], section)
        assert told in str(caught.value)


def test_rules_are_changed_by_name_and_the_others_stay() -> None:
    changes = {
        "kl_runaway": {"action": "rollback", "window": 5, "threshold": 1.2, "adjust": {"lr": 0.25}},
        "length_at_limit": {"threshold": {"length of start": 2.0}},
        "mode_collapse": {"action": "ignore"},
        "reference_perplexity_runaway": {"action": "rollback"},
        "reward_flat": {"after": 50},
    }
    ppo = check_params(told(**changes)).ppo
    rules = {rule.name: rule for rule in rules_for(ppo.health, ppo.kl.coefficient)}
    default = {rule.name: rule for rule in DEFAULT_RULES}
    runaway = rules["kl_runaway"]
    assert (runaway.action, runaway.adjust, runaway.severity) == (
        "rollback",
        (("lr", 0.25),),
        "critical",
    )
    assert [(check.window, check.bound, check.of) for check in runaway.checks] == [
        (5, 1.2, "limit:kl")
    ]
    assert [check.bound for check in rules["length_at_limit"].checks] == [0.85, 2.0]
    assert dict(rules["reference_perplexity_runaway"].adjust) == {"kl_coefficient": 2.0, "lr": 0.5}
    assert (
        rules["reward_flat"].after == 50
        and rules["reward_flat"].checks == default["reward_flat"].checks
    )
    assert set(default) - set(rules) == {"mode_collapse"}
    assert all(rules[name] == default[name] for name in set(default) - set(changes))
    assert rules_for(PpoConfig().health, kl_coefficient=0.05) == DEFAULT_RULES
    assert not any(rule.action == "rollback" for rule in DEFAULT_RULES)


@pytest.mark.parametrize("profile", ["demo", "smoke"])
def test_a_shared_backbone_can_be_had_by_overrides_alone(profile: str) -> None:
    overlay = (profile, profile_text(ROOT / "profiles", profile))
    sets = ["ppo.critic_mode=shared", "ppo.critic_optimizer=null"]
    text = merge((ROOT / "params.yaml").read_text(), [overlay], sets)
    assert check_params(yaml_text.parse(text, "params.yaml")).ppo.rollout.critic_mode == "shared"


def test_a_gate_that_files_can_never_pass_is_refused_before_anything_is_trained() -> None:
    text = (ROOT / "params.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"gates\.policy\[1\] asks for comparison\.gold.*profile own-data"
    ):
        merge(text, sets=["collect.source=files"])
    overlay = ("own-data", (ROOT / "profiles/own-data.yaml").read_text())
    params = check_params(yaml_text.parse(merge(text, [overlay]), "params.yaml"))
    demo = check_params(yaml_text.parse(text, "params.yaml"))
    # What files bring in place of the gold judge is safety, on prompts that are no toys.
    own, of_demo = (
        [condition.metric for condition in gates.policy] for gates in (params.gates, demo.gates)
    )
    assert set(own) - set(of_demo) == {"safety.refusal_log_odds", "safety.answers_benign"}
    of_the_world = {
        "comparison.gold.win_rate_low95",
        "policy.perplexity_pretrain",
        "regression.passed",
    }
    assert set(of_demo) - set(own) == of_the_world


@pytest.mark.parametrize(
    ("metric", "source", "message"),
    [
        ("probes.valus_swapped", "world", "did you mean 'values_swapped'"),
        ("referee.probes.world_fact_high", "world", "did you mean 'world_fact'"),
        (
            "judge.probes.world_fact_low95",
            "files",
            "asks for judge.probes.world_fact_low95, but collect.source is files",
        ),
        ("probes.values_swapped_low95", "files", ""),
        ("probes.world_story_pairs", "world", ""),
    ],
)
def test_a_gate_on_a_probe_that_cannot_be_is_refused(
    metric: str, source: str, message: str
) -> None:
    text = f"collect: {{source: {source}}}\ngates: {{mode: report, reward: [{{metric: {metric}, at_least: 0.5, why: x}}]}}"
    params = yaml_text.parse(text, "params.yaml")
    if not message:
        check_params(params)
        return
    with pytest.raises(ConfigError, match=rf"gates\.reward\[0\].*{message}"):
        check_params(params)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["own-data", "alpaca-eval", "smollm2-360m"])
def test_profiles_for_real_data_control_for_length(profile: str) -> None:
    overlay = (profile, profile_text(ROOT / "profiles", profile))
    params = check_params(
        yaml_text.parse(merge((ROOT / "params.yaml").read_text(), [overlay]), "params.yaml")
    )
    assert (
        params.reward.length_balance
        == params.referee.length_balance
        == params.judge.length_balance
        == "sampling"
    )
    reward, policy = (
        {c.metric for c in gate} for gate in (params.gates.reward, params.gates.policy)
    )
    assert "test_accuracy_length_balanced_low95" in reward and "accuracy" not in reward
    assert {f"{model}.test_accuracy_length_balanced" for model in ("referee", "judge")} <= reward
    assert {"comparison.judge.win_rate_low95", "comparison.judge.lc_win_rate_low95"} <= policy
    assert (
        check_params(yaml_text.parse((ROOT / "params.yaml").read_text(), "x")).reward.length_balance
        == "none"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile", sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml"))
)
def test_no_profile_gates_the_policy_by_what_selected_it(profile: str) -> None:
    overlay = (profile, profile_text(ROOT / "profiles", profile))
    params = check_params(
        yaml_text.parse(merge((ROOT / "params.yaml").read_text(), [overlay]), "params.yaml")
    )
    metrics = {condition.metric for condition in params.gates.policy}
    judge = "judge" if params.collect.pairs else "checker"
    assert f"comparison.{judge}.win_rate_low95" in metrics
    assert not [
        metric
        for metric in metrics
        if metric.startswith(("comparison.referee.", "comparison.reward."))
    ]
    assert params.judge.model_dump() == params.referee.model_dump()


def test_a_profile_extends_another(tmp_path: Path) -> None:
    for name, text in {
        "large": "# Large.\nseed: 3\nsft: {steps: 7, batch_size: 4}\n",
        "larger": "# Larger.\nextends: large\nsft: {steps: 9}\n",
        "largest": "extends: larger\nseed: 5\n",
        "round": "extends: trip\n",
        "trip": "extends: round\n",
        "lost": "extends: larg\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    merged = yaml_text.plain(yaml_text.parse(profile_text(tmp_path, "largest"), "x"))
    assert merged == {"seed": 5, "sft": {"steps": 9, "batch_size": 4}}
    with pytest.raises(ConfigError, match="'round' extends itself, by round, trip"):
        profile_text(tmp_path, "round")
    with pytest.raises(ConfigError, match=r"no profile 'larg'.*large"):
        profile_text(tmp_path, "lost")


@pytest.mark.parametrize(
    "text",
    [
        "extends: large # as it is\nsft: {steps: 9}\n",
        "extends: 'large'\nsft: {steps: 9}\n",
        "sft: {steps: 9}\nextends: large",
        "\ufeffextends: large\r\nsft: {steps: 9}\r\n",
        "extends : large\nsft: {steps: 9}\n",
        "{extends: large, sft: {steps: 9}}\n",
    ],
)
def test_a_profile_extends_another_however_yaml_writes_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("seed: 3\nsft: {steps: 7, batch_size: 4}\n")
    (tmp_path / "mine.yaml").write_bytes(text.encode())
    merged = yaml_text.plain(yaml_text.parse(profile_text(tmp_path, "mine"), "x"))
    assert merged == {"seed": 3, "sft": {"steps": 9, "batch_size": 4}}


def test_each_of_several_problems_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        check_params({"sft": {"stepz": 3}, "ppo": {"iterations": -1}})
    heading, *problems = str(caught.value).splitlines()
    assert heading == "params.yaml: 2 problems" and len(problems) == 2


def test_defaults_are_valid_and_sets_keep_comments() -> None:
    assert check_params({}) == Params()
    text = merge(BASE, sets=["sft.steps=7", "ppo.kl.coefficient=2e-2", "ppo.advantage.clip=null"])
    assert "# few" in text and "steps: 7" in text
    assert "coefficient: 2e-2" in text.replace("0.02", "2e-2")


@pytest.mark.parametrize("assignment", ["sft.steps", "=3", "sft.stepz=3", "sft.steps=many"])
def test_bad_assignments_are_refused(assignment: str) -> None:
    with pytest.raises(ConfigError):
        merge(BASE, sets=[assignment])


def test_overlay_wins_over_base_and_set_over_overlay() -> None:
    text = merge(BASE, [("p", "sft: {steps: 9, batch_size: 4}")], ["sft.batch_size=8"])
    assert "steps: 9" in text and "batch_size: 8" in text and "lr: 1e-3" in text


def test_section_takes_the_seed_from_the_top(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(BASE)
    section = load_section(tmp_path, "sft", SftConfig)
    assert (section.seed, section.steps, section.optimizer.lr) == (3, 5, 1e-3)


@pytest.mark.parametrize("text", ["sft: [", "- a", "sft: {steps: 3"])
def test_broken_yaml_is_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"params\.yaml"):
        load_section(tmp_path, "sft", SftConfig)


BOMB = "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))])  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        BOMB, "a: " + "[" * 5000, "a: " + "{b: " * 3000,
        "a: " + "[" * 5000 + "]" * 5000, "a: \0", "a: \x07", "seed: " + "9" * 20000, "seed: 2020-13-45",
        "seed: " + "x" * 9000, "k" * 9000 + ": 1", "a: *nothing", "b: 1\n---\nb: 2", "# " + "x" * 300_000,
        "\n".join(f"k{number}: {number}" for number in range(300)), "a: !!binary x",
    ],
)  # fmt: skip
def test_hostile_yaml_is_a_short_message_at_once(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_params(yaml_text.parse(text, "params.yaml"))
    assert len(str(refused.value)) < 6000 and str(refused.value).count("\n") <= 21
    assert isinstance(yaml_text.parse_scalar("[" * 50), str)


def test_workspace_name_ignores_the_order_of_overrides() -> None:
    assert workspace_name("demo", []) == "demo"
    assert (
        workspace_name("demo", ["a=1", "b=2"]) == workspace_name("demo", ["b=2", "a=1"]) != "demo"
    )


def test_a_pool_may_be_named_alone_or_with_what_the_job_asks_for() -> None:
    asked = {
        "pool": "cluster",
        "queue": "long",
        "gpus": 1,
        "memory": "512Gi",
        "variables": {"priority_class": "low"},
    }
    params = check_params({"pools": {"sft": "cluster", "ppo": asked, "reward": "gpu-pool"}})
    assert params.pools["sft"].pool == "cluster" and params.pools["sft"].job_variables() == {}
    assert params.pools["ppo"].job_variables() == {
        "gpus": 1,
        "memory": "512Gi",
        "priority_class": "low",
    }
    assert params.pool_names() == ["cluster", "gpu-pool"]


@pytest.mark.parametrize(
    ("gpus", "launch", "complaint"),
    [
        (8, {"processes": 8}, None),
        (None, {"processes": 8}, None),
        (0, {}, None),
        (8, {}, "pools.ppo.gpus is 8, but the stage runs as 1 process"),
        (1, {"processes": 2}, "pools.ppo.gpus is 1, but the stage runs as 2 process"),
        (
            None,
            {"nodes": 2, "rendezvous": "a:1"},
            "nodes is 2, but pools.ppo.nodes is 1",
        ),
    ],
)
def test_a_job_has_one_gpu_for_each_process(
    gpus: int | None, launch: dict, complaint: str | None
) -> None:
    document = {
        "pools": {"ppo": {"pool": "cluster", "gpus": gpus}},
        "compute": {"launch": {"ppo": launch}},
    }
    if complaint is None:
        assert check_params(document).pools["ppo"].gpus == gpus
    else:
        with pytest.raises(ConfigError, match=complaint):
            check_params(document)


def test_a_pool_takes_one_job_at_a_time_unless_told_otherwise() -> None:
    params = check_params({"work_pools": {"cluster": {"limit": 4}}})
    assert params.pool_limit("cluster") == 4 and params.pool_limit("gpu-pool") == 1


@pytest.mark.parametrize("stage", ["sft", "reward", "referee", "judge", "critic", "ppo"])
def test_bfloat16_without_master_weights_is_refused(stage: str) -> None:
    """Its small updates would round to nothing; every other engine and stage of ZeRO keeps float32
    masters.
    """
    launch: dict[str, Any] = {"engine": "deepspeed", "zero": 0}
    check_params({"compute": {"launch": {stage: launch}}})
    with pytest.raises(
        ConfigError, match=rf"compute\.launch\.{stage}\.zero 0 keeps no float32 master weights"
    ):
        check_params({"base": {"dtype": "bfloat16"}, "compute": {"launch": {stage: launch}}})
    for kept in ({"engine": "deepspeed", "zero": 1}, {"engine": "local"}):
        check_params({"base": {"dtype": "bfloat16"}, "compute": {"launch": {stage: kept}}})


MODEL, URL = {"kind": "model"}, "http://127.0.0.1:8000/score"


def parsed(*sources: dict[str, Any]) -> PpoConfig:
    return check_params({"ppo": {"reward": {"sources": list(sources)}}}).ppo


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([], "'ppo.reward.sources': nothing would score the replies"),
        (
            [{"kind": "htp", "url": URL}],
            "'ppo.reward.sources.0.kind': there is no 'htp'; did you mean 'http'?",
        ),
        ([MODEL, {"url": URL}], "'ppo.reward.sources.1.kind' is missing"),
        ([{"kind": "http"}], "'ppo.reward.sources.0.url' is missing"),
        (
            [{"kind": "http", "url": URL, "retry": 1}],
            "'ppo.reward.sources.0.retry'; did you mean 'ppo.reward.sources.0.retries'?",
        ),
        (
            [{"kind": "http", "url": "127.0.0.1:80"}],
            "url must be an absolute http:// or https:// address",
        ),
        ([{"kind": "http", "url": "http://a:99999/"}], "url must be an absolute"),
        (
            [{"kind": "model", "weight": 0.0}],
            "'ppo.reward.sources.0': weight 0 scores every reply for nothing",
        ),
        ([MODEL, {"kind": "http", "url": URL, "weight": -1.0}], "the weights sum to 0"),
        (
            [{"kind": "model", "weight": float("inf")}],
            "'ppo.reward.sources.0.weight': input should be a finite number",
        ),
        ([{"kind": "ensemble", "paths": ["a"]}], "an ensemble needs two or more different paths"),
        (
            [{"kind": "ensemble", "paths": ["a", "a"]}],
            "an ensemble needs two or more different paths",
        ),
        (
            [{"kind": "ensemble", "paths": ["a", 3]}],
            "'ppo.reward.sources.0.paths.1': input should be a valid string",
        ),
        (
            [{"kind": "ensemble", "paths": ["a", "b"], "k": -1.0}],
            "'ppo.reward.sources.0.k': input should be greater",
        ),
        (
            [{"kind": "classifier", "model": "a", "template": "chatt"}],
            "template must be one of chat, pair, reply, or",
        ),
        ([{"kind": "classifier", "model": "a", "label": 1.5}], "'ppo.reward.sources.0.label"),
        (
            [{"kind": "function", "target": "rules.f"}],
            "a function is written package.module:function, not 'rules.f'",
        ),
        (
            [{"kind": "function", "target": "../rules:f"}],
            "a function is written package.module:function",
        ),
        (
            [MODEL, MODEL, {"kind": "model", "name": "model_2"}],
            "same name (model, model_2, model_2)",
        ),
        ([{"kind": "model", "name": "My model"}], "'ppo.reward.sources.0.name'"),
    ],
    ids=str,
)
def test_wrong_sources_are_refused_in_one_line(
    sources: list[dict[str, Any]], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*sources)
    first, *others = str(caught.value).splitlines()
    # A label is a name or a number: the message says of each why it is not one.
    assert expected in first or (expected in others[0] and "label" in expected)
    assert not others or "label" in expected


@pytest.mark.parametrize(
    ("source", "secret"),
    [
        ({"url": "http://me:hunter2@a/"}, "hunter2"),
        ({"url": "http://a/?lang=en&api_key=hunter2"}, "hunter2"),
        ({"url": URL, "token_env": "sk-hunter2"}, "hunter2"),
    ],
)
def test_a_secret_in_the_wrong_place_is_refused_and_not_repeated(
    source: dict[str, Any], secret: str
) -> None:
    with pytest.raises(ConfigError, match="environment variable") as caught:
        parsed({"kind": "http"} | source)
    assert secret not in str(caught.value)


def test_names_are_kinds_and_numbers_unless_given() -> None:
    sources = parsed(
        MODEL, MODEL, {"kind": "model", "name": "safety"}, {"kind": "http", "url": URL}
    ).reward.sources
    assert source_names(sources) == ("model", "model_2", "safety", "http")


def test_the_default_is_the_own_reward_model_for_both_stages() -> None:
    assert PpoConfig().reward.sources == PpoConfig().rollout.reward.sources == DEFAULT_SOURCES
    assert [(s.kind, s.path, s.weight) for s in DEFAULT_SOURCES if s.kind == "model"] == [
        ("model", "models/reward", 1)
    ]


def test_sources_are_units_that_critic_and_ppo_share(tmp_path: Path) -> None:
    from rlhf_core.config.policy import CriticStageConfig

    (tmp_path / "params.yaml").write_text(
        f"ppo: {{reward: {{sources: [{{kind: http, url: '{URL}'}}]}}}}\n"
    )
    critic = load_section(tmp_path, "critic", CriticStageConfig, ("ppo", "policy"))
    assert (
        critic.ppo.rollout.reward.sources
        == load_section(tmp_path, "ppo", PpoConfig).reward.sources
        != DEFAULT_SOURCES
    )


def test_a_change_of_the_sources_makes_critic_and_ppo_stale() -> None:
    """Both stages list the sources among their parameters and what the sources read among their
    dependencies.
    """
    stages = yaml_text.plain(yaml_text.read(Path(__file__).parents[2] / "dvc.yaml"))["stages"]
    assert "ppo.reward" in stages["critic"]["params"] and "ppo" in stages["ppo"]["params"]
    for stage in ("critic", "ppo"):
        assert ".fingerprints/reward_sources.txt" in stages[stage]["deps"]


def test_folders_move_with_a_workspace_and_names_do_not(tmp_path: Path) -> None:
    """A trial's workspace lies elsewhere; its own models are its own, and what is no folder may be
    a hub id.
    """
    base, trial = tmp_path / "base", tmp_path / "base/workspaces/trial"
    for folder in (base / "extra/rm", base / "models/reward", tmp_path / "models/rm"):
        folder.mkdir(parents=True)
    text = merge(
        "ppo:\n  reward:\n    sources:\n"
        "      - {kind: ensemble, paths: [models/reward, extra/rm, ../models/rm, /abs/rm]}\n"
        "      - {kind: classifier, model: extra/rm}\n"
        "      - {kind: classifier, model: owner/name, name: hub}\n"
        "      - {kind: model, name: own}\n"
    )
    up = rebase_sources(text, base, tmp_path)
    moved = yaml_text.plain(yaml_text.parse(rebase_sources(up, tmp_path, trial), "p"))["ppo"][
        "reward"
    ]["sources"]
    assert moved[0]["paths"][0] == "models/reward" and moved[0]["paths"][3] == "/abs/rm"
    assert [os.path.normpath(trial / path) for path in moved[0]["paths"][1:3]] == [
        str(base / "extra/rm"), str(tmp_path / "models/rm"),
    ]  # fmt: skip
    assert os.path.normpath(trial / moved[1]["model"]) == str(base / "extra/rm")
    assert moved[2]["model"] == "owner/name" and "path" not in moved[3]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("registry.signature.public_key", "keys/a.pem"),
        ("registry.signature.certificates", ["keys/root.pem", "/etc/root.pem"]),
        ("evaluate.multiple_choice.files", ["test/*.csv"]),
        ("collect.files.preferences", ["a.jsonl", {"path": "data/annotations/b.jsonl", "cap": 9}]),
        ("collect.annotations", "labels/*.jsonl"),
        ("evaluate.verifiable.path", "checks.jsonl"),
        ("checkpoints.store", "partial"),
        ("evaluate.opponents", [{"name": "a", "path": "theirs.jsonl"}]),
    ],
)
def test_every_path_of_a_workspace_is_seen_from_its_trials(
    tmp_path: Path, setting: str, value: Any
) -> None:
    text = merge("profile: demo\n", sets=[f"{setting}={json.dumps(value)}"])
    (moved,) = rebased(text, tmp_path / "base", tmp_path / "base/workspaces/trial", setting)
    expected = [path if path.startswith("/") else f"../../{path}" for path in paths_of(value)]
    assert paths_of(moved) == expected


@pytest.mark.parametrize("section", ["ppo", "evaluate"])
def test_a_python_with_vllm_is_seen_from_a_trial(tmp_path: Path, section: str) -> None:
    (tmp_path / "vllm/bin").mkdir(parents=True)
    (tmp_path / "vllm/bin/python").symlink_to(sys.executable)
    given = {"vllm/bin/python": "../../vllm/bin/python"}
    given |= {path: path for path in ("python3", "~/vllm/bin/python", "/opt/vllm/bin/python")}
    for path, seen in given.items():
        text = f"{section}:\n  sampler: {{kind: vllm, python: {path}}}\n"
        assert rebased(text, tmp_path, tmp_path / "a/b", f"{section}.sampler.python") == [seen]
    text = f"{section}:\n  sampler: {{kind: vllm, url: 'http://a', weights_folder: shared}}\n"
    assert rebased(text, tmp_path, tmp_path / "a/b", f"{section}.sampler.weights_folder") == [
        "../../shared"
    ]


def test_a_file_for_deepspeed_is_seen_from_a_trial(tmp_path: Path) -> None:
    text = (
        "compute:\n  launch:\n    ppo: {engine: deepspeed, deepspeed: zero.json}\n    sft: null\n"
    )
    assert rebased(text, tmp_path, tmp_path / "a/b", "compute.launch.ppo.deepspeed") == [
        "../../zero.json"
    ]


def rebased(text: str, origin: Path, target: Path, setting: str) -> list[Any]:
    document: Any = yaml_text.plain(yaml_text.parse(rebase_sources(text, origin, target), "p"))
    for key in setting.split("."):
        document = document[key]
    return [document]


def paths_of(value: Any) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    return [entry["path"] if isinstance(entry, dict) else entry for entry in entries]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("b #c", "b #c"),
        (" # whole", "# whole"),
        ("'b' #c", "b"),
        ("[1, 2] # two", [1, 2]),
        ("3", 3),
        ("b#c", "b#c"),
    ],
)
def test_a_command_line_has_no_comments(value: str, expected: object) -> None:
    assert parse_assignment(f"a.b={value}") == ("a.b", expected)
