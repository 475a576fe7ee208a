"""Reward sources of other packages: their settings, their rewards, and how they are refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from plugin_distributions import Install, example, refusal

from rlhf_core.config.loading import check_params
from rlhf_core.config.reward_sources import RewardSources, source_names
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.fingerprint.tracked_files import REWARD_SOURCES_FILE, write_tracked_files
from rlhf_core.plugins import REWARD_SOURCES
from rlhf_core.ppo.reward_sources.build import build_reward_fn

from .conftest import Place

KEEP = example("A sampler and a reward source")
SCORES = "[-max(len(text.split()) - self.most, 0) for text in replies.texts]"
assert SCORES in KEEP


@pytest.fixture
def brevity(install: Install, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs the source of the docs, maybe with other scores."""

    def make(scores: str = SCORES) -> None:
        monkeypatch.delitem(sys.modules, "source_of_docs", raising=False)
        entries = {"brevity": "source_of_docs:BrevitySource"}
        install("keep", REWARD_SOURCES, entries, source_of_docs=KEEP.replace(SCORES, scores))

    return make


def sources(*given: dict[str, Any]) -> RewardSources:
    return check_params({"ppo": {"reward": {"sources": list(given)}}}).ppo.reward.sources


def test_the_source_of_the_docs_rewards_beside_others(
    brevity: Install, place: Place, tmp_path: Path
) -> None:
    brevity()
    mixed = sources({"kind": "brevity", "most": 1, "weight": 2.0}, {"kind": "model"})
    assert source_names(mixed) == ("brevity", "model")
    alone = build_reward_fn(mixed[:1], place.context)
    assert alone(place.replies(["red", "a tree near"]).tokens).tolist() == [0.0, -4.0]
    both = build_reward_fn(mixed, place.context)
    both(place.replies(["red", "a tree near"]).tokens)
    assert both.metrics["source_brevity_mean"] == -1.0
    write_tracked_files(
        tmp_path, check_params({"ppo": {"reward": {"sources": [{"kind": "brevity"}]}}}).ppo
    )
    seen = (tmp_path / REWARD_SOURCES_FILE).read_text()
    assert "rlhf.reward_sources brevity: keep 1" in seen


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            {"kind": "brevty"},
            "'ppo.reward.sources.0.kind': there is no 'brevty'; did you mean 'brev",
        ),
        (
            {"kind": "brevity", "mots": 1},
            "'ppo.reward.sources.0.mots'; did you mean 'ppo.reward.sources.0.most'",
        ),
        ({"kind": "brevity", "most": "x"}, "'ppo.reward.sources.0.most'"),
        ({"kind": "brevity", "weight": 0}, "weight 0 scores every reply for nothing"),
    ],
)
def test_its_settings_are_checked_with_their_path(
    brevity: Install, source: dict[str, Any], said: str
) -> None:
    brevity()
    assert said in refusal(sources, source)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ("[1.0]", "gave 1 scores for 2 replies"),
        ("[float('inf')] * len(replies)", "must be finite"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_it_gives_is_checked_before_training(
    brevity: Install, place: Place, scores: str, said: str
) -> None:
    brevity(scores)
    with pytest.raises(DataError, match=said) as caught:
        build_reward_fn(sources({"kind": "brevity"}), place.context)
    assert "'brevity' (brevity)" in str(caught.value)


def test_a_reply_that_it_cannot_score_is_left_out(brevity: Install, place: Place) -> None:
    brevity("[None if text == 'red' else 1.0 for text in replies.texts]")
    mixture = build_reward_fn(sources({"kind": "brevity"}), place.context)
    rewards = mixture(place.replies(["red", "a tree"]).tokens).tolist()
    assert math.isnan(rewards[0]) and rewards[1] == 1.0 and mixture.metrics["unscored"] == 0.5


def test_one_that_cannot_begin_is_one_line(
    install: Install, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    monkeypatch.delitem(sys.modules, "late_source", raising=False)
    late = KEEP.replace(f"return lambda replies: {SCORES}", "return open(workspace / 'no file')")
    install("late", REWARD_SOURCES, {"brevity": "late_source:BrevitySource"}, late_source=late)
    with pytest.raises(RlhfError, match=r"brevity of rlhf.reward_sources cannot begin: .*no file"):
        build_reward_fn(sources({"kind": "brevity"}), place.context)
