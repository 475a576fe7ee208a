"""ppo.reward.sources in params.yaml: what is accepted, and one clear line for what is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import yaml_text
from rlhf_core.config.loading import check_params, load_section, merge, rebase_sources
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.config.reward_sources import DEFAULT_SOURCES, source_names
from rlhf_core.errors import ConfigError

MODEL, URL = {"kind": "model"}, "http://127.0.0.1:8000/score"


def parsed(*sources: dict[str, Any]) -> PpoConfig:
    return check_params({"ppo": {"reward": {"sources": list(sources)}}}).ppo


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([], "'ppo.reward.sources': nothing would score the replies"),
        ([{"kind": "htp", "url": URL}], "'ppo.reward.sources.0.kind': there is no 'htp'; did you mean 'http'?"),
        ([MODEL, {"url": URL}], "'ppo.reward.sources.1.kind' is missing"),
        ([{"kind": "http"}], "'ppo.reward.sources.0.url' is missing"),
        ([{"kind": "http", "url": URL, "retry": 1}], "'ppo.reward.sources.0.retry'; did you mean 'retries'?"),
        ([{"kind": "http", "url": "127.0.0.1:80"}], "url must be an absolute http:// or https:// address"),
        ([{"kind": "http", "url": "http://a:99999/"}], "url must be an absolute"),
        ([{"kind": "model", "weight": 0.0}], "'ppo.reward.sources.0': weight 0 scores every reply for nothing"),
        ([MODEL, {"kind": "http", "url": URL, "weight": -1.0}], "the weights sum to 0"),
        ([{"kind": "model", "weight": float("inf")}], "'ppo.reward.sources.0.weight': input should be a finite number"),
        ([{"kind": "ensemble", "paths": ["a"]}], "an ensemble needs two or more different paths"),
        ([{"kind": "ensemble", "paths": ["a", "a"]}], "an ensemble needs two or more different paths"),
        ([{"kind": "ensemble", "paths": ["a", 3]}], "'ppo.reward.sources.0.paths.1': input should be a valid string"),
        ([{"kind": "ensemble", "paths": ["a", "b"], "k": -1.0}], "'ppo.reward.sources.0.k': input should be greater"),
        ([{"kind": "classifier", "model": "a", "template": "chatt"}], "template must be one of chat, pair, reply, or"),
        ([{"kind": "classifier", "model": "a", "label": 1.5}], "'ppo.reward.sources.0.label"),
        ([{"kind": "function", "target": "rules.f"}], "a function is written package.module:function, not 'rules.f'"),
        ([{"kind": "function", "target": "../rules:f"}], "a function is written package.module:function"),
        ([MODEL, MODEL, {"kind": "model", "name": "model_2"}], "same name (model, model_2, model_2)"),
        ([{"kind": "model", "name": "My model"}], "'ppo.reward.sources.0.name'"),
    ],
    ids=str,
)
def test_wrong_sources_are_refused_in_one_line(sources: list[dict[str, Any]], expected: str) -> None:
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
def test_a_secret_in_the_wrong_place_is_refused_and_not_repeated(source: dict[str, Any], secret: str) -> None:
    with pytest.raises(ConfigError, match="environment variable") as caught:
        parsed({"kind": "http"} | source)
    assert secret not in str(caught.value)


def test_names_are_kinds_and_numbers_unless_given() -> None:
    sources = parsed(MODEL, MODEL, {"kind": "model", "name": "safety"}, {"kind": "http", "url": URL}).reward.sources
    assert source_names(sources) == ("model", "model_2", "safety", "http")


def test_the_default_is_the_own_reward_model_for_both_stages() -> None:
    assert PpoConfig().reward.sources == PpoConfig().rollout.reward.sources == DEFAULT_SOURCES
    assert [(s.kind, s.path, s.weight) for s in DEFAULT_SOURCES if s.kind == "model"] == [("model", "models/reward", 1)]


def test_sources_are_units_that_critic_and_ppo_share(tmp_path: Path) -> None:
    from rlhf_core.config.policy import CriticStageConfig

    (tmp_path / "params.yaml").write_text(f"ppo: {{reward: {{sources: [{{kind: http, url: '{URL}'}}]}}}}\n")
    critic = load_section(tmp_path, "critic", CriticStageConfig, ("ppo", "policy"))
    assert (
        critic.ppo.rollout.reward.sources == load_section(tmp_path, "ppo", PpoConfig).reward.sources != DEFAULT_SOURCES
    )


def test_a_change_of_the_sources_makes_critic_and_ppo_stale() -> None:
    """Both stages list the sources among their parameters and what the sources read among their dependencies."""
    stages = yaml_text.plain(yaml_text.read(Path(__file__).parents[2] / "dvc.yaml"))["stages"]
    assert "ppo.reward" in stages["critic"]["params"] and "ppo" in stages["ppo"]["params"]
    for stage in ("critic", "ppo"):
        assert ".fingerprints/reward_sources.txt" in stages[stage]["deps"]


def test_folders_move_with_a_workspace_and_names_do_not(tmp_path: Path) -> None:
    """A trial's workspace lies elsewhere; its own models are its own, and what is no folder may be a hub id."""
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
    moved = yaml_text.plain(yaml_text.parse(rebase_sources(up, tmp_path, trial), "p"))["ppo"]["reward"]["sources"]
    assert moved[0]["paths"][0] == "models/reward" and moved[0]["paths"][3] == "/abs/rm"
    assert [os.path.normpath(trial / path) for path in moved[0]["paths"][1:3]] == [
        str(base / "extra/rm"), str(tmp_path / "models/rm"),
    ]  # fmt: skip
    assert os.path.normpath(trial / moved[1]["model"]) == str(base / "extra/rm")
    assert moved[2]["model"] == "owner/name" and "path" not in moved[3]
