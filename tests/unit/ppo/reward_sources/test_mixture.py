"""Reward models on the policy's own tokens, ensembles, and the weighted sum."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor

from rlhf_core.config.reward_sources import DEFAULT_SOURCES, RewardSources
from rlhf_core.data.tokens import encode_dialogue
from rlhf_core.errors import ConfigError, DataError, ModelError, RlhfError
from rlhf_core.models.heads import ScalarModel
from rlhf_core.ppo.reward_sources.build import EnsembleRewards, build_reward_fn
from rlhf_core.ppo.reward_sources.source import (
    Replies,
    RewardMixture,
    WeightedSource,
    checked_rewards,
    reward_metrics,
    reward_model_fn,
)
from rlhf_core.sampling.token_scoring import Tokens

from .conftest import Place, demonstration

TEXTS = ["red", "the sky is blue and blue", "", "green", "a tree near a tree"]


def sources(*values: dict[str, Any]) -> RewardSources:
    return TypeAdapter(RewardSources).validate_python(list(values))


class Constant:
    """A source that knows its scores beforehand."""

    def __init__(self, scores: list[float], **metrics: float) -> None:
        self.scores, self.metrics = scores, metrics

    def rewards(self, replies: Replies) -> Tensor:
        return torch.tensor(self.scores)


def mixture(place: Place, *parts: WeightedSource) -> RewardMixture:
    return RewardMixture(parts, place.replies(["x"]).reader, place.tokenizer)


def test_the_default_is_the_reward_model_bit_for_bit(place: Place) -> None:
    tokens = place.replies(TEXTS).tokens
    scorer = build_reward_fn(DEFAULT_SOURCES, place.context)
    alone = reward_model_fn(ScalarModel.load(place.context.reward).eval())
    assert (
        torch.equal(scorer(tokens), alone(tokens))
        and reward_metrics(scorer) == reward_metrics(alone) == {}
    )


def test_a_model_scores_the_end_of_the_very_tokens(place: Place) -> None:
    """An unfinished reply is read at its last word, a finished one at its end marker."""
    model = ScalarModel.load(place.context.reward)
    finished = [True, False, True, False, True]
    scores = build_reward_fn(sources({"kind": "model"}), place.context)(
        place.replies(TEXTS, finished).tokens
    )
    for row, text, end, score in zip(place.rows, TEXTS, finished, scores.tolist(), strict=False):
        prompt, reply = encode_dialogue(place.tokenizer, row.prompt, text)
        ids = torch.tensor([prompt + (reply if end else reply[:-1])])
        with torch.no_grad():
            assert score == pytest.approx(
                float(model.reply_scores(ids, torch.ones_like(ids))[0]), abs=1e-5
            )


def test_the_sum_is_weighted_and_each_source_is_told(place: Place) -> None:
    a = WeightedSource("a", 2.0, Constant([1.0, 2.0, 6.0]))
    b = WeightedSource("b", -0.5, Constant([4.0, 0.0, 2.0], truncated=0.25))
    mixed = mixture(place, a, b)
    assert mixed(place.replies(["x", "y", "z"]).tokens).tolist() == [0.0, 4.0, 11.0]
    of_a = {"source_a_mean": 3.0, "source_a_std": math.sqrt((4 + 1 + 9) / 3)}
    of_b = {"source_b_mean": 2.0, "source_b_std": math.sqrt(8 / 3), "source_b_truncated": 0.25}
    assert mixed.metrics == pytest.approx(of_a | of_b)


def test_a_lone_source_has_no_metrics_but_its_own(place: Place) -> None:
    mixed = mixture(place, WeightedSource("a", 3.0, Constant([1.0, 2.0], spread=0.5)))
    assert mixed(place.replies(["x", "y"]).tokens).tolist() == [3.0, 6.0]
    assert mixed.metrics == {"source_a_spread": 0.5}


def test_text_is_what_the_rollout_holds(place: Place) -> None:
    replies = place.replies(TEXTS, finished=[True, False, True, True, False])
    assert replies.texts == TEXTS and replies.finished == [True, False, True, True, False]
    assert replies.prompts == [row.prompt for row in place.rows[: len(TEXTS)]]


def test_tokens_of_an_unknown_prompt_are_refused(place: Place) -> None:
    replies = place.replies(["red", "blue"])
    tokens = replies.tokens.tokens.clone()
    tokens[1, tokens.shape[1] - replies.tokens.width - 3] += 1
    strange = Tokens(tokens, replies.tokens.attention_mask, replies.tokens.response_mask)
    with pytest.raises(
        RlhfError, match="row 1 of the rollout does not begin with any of the prompts"
    ):
        _ = Replies(strange, replies.reader, place.tokenizer).prompts


def test_an_ensemble_is_mean_minus_k_std(place: Place) -> None:
    """Hand-computed: members 1, 5 and 3 have mean 3 and population std sqrt(8 / 3)."""
    members = [lambda batch, value=value: torch.full((2,), value) for value in (1.0, 5.0, 3.0)]
    ensemble = EnsembleRewards(members, [0.0, 0.0, 0.0], 0.5)
    assert ensemble.rewards(place.replies(["x", "y"])).tolist() == pytest.approx(
        [3 - 0.5 * math.sqrt(8 / 3)] * 2
    )
    assert ensemble.metrics["spread"] == pytest.approx(math.sqrt(8 / 3))


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=4), st.floats(0, 3), st.floats(-9, 9))
def test_a_members_origin_changes_nothing_once_centred(
    place: Place, values: list[float], k: float, by: float
) -> None:
    def scores(shift: float) -> float:
        members = [lambda batch, v=v, i=i: torch.tensor([v + shift * i], dtype=torch.float64)
                   for i, v in enumerate(values)]  # fmt: skip
        origins = [shift * i for i in range(len(values))]
        return float(EnsembleRewards(members, origins, k).rewards(place.replies(["x"]))[0])

    assert scores(by) == pytest.approx(scores(0.0), abs=1e-9)


def test_an_ensemble_of_folders_centres_each_member_on_demonstrations(place: Place) -> None:
    paths = ["models/reward", "extra/second"]
    tokens = place.replies(TEXTS).tokens
    models = [ScalarModel.load(place.root / path) for path in paths]
    dialogues = [
        encode_dialogue(place.tokenizer, row.prompt, row.reply)
        for row in map(demonstration, range(20))
    ]
    raw, origins = [], []
    with torch.no_grad():
        for model in models:
            raw.append(reward_model_fn(model)(tokens).double())
            ids = [torch.tensor([prompt + reply]) for prompt, reply in dialogues]
            origins.append(
                sum(float(model.reply_scores(i, torch.ones_like(i))) for i in ids) / len(ids)
            )
    a, b = raw[0] - origins[0], raw[1] - origins[1]
    centred = build_reward_fn(
        sources({"kind": "ensemble", "paths": paths, "k": 2.0}), place.context
    )(tokens)
    assert centred.tolist() == pytest.approx(
        ((a + b) / 2 - 2.0 * (a - b).abs() / 2).tolist(), abs=1e-5
    )
    plain = build_reward_fn(
        sources({"kind": "ensemble", "paths": paths, "center": False}), place.context
    )(tokens)
    assert plain.tolist() == pytest.approx(torch.minimum(raw[0], raw[1]).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("source", "error", "expected"),
    [
        ({"kind": "model", "path": "models/referee"}, ConfigError, "only models/reward may score"),
        ({"kind": "model", "path": "models/judge"}, ConfigError, "only models/reward may score"),
        (
            {"kind": "model", "path": "extra/../models/sft"},
            ConfigError,
            "only models/reward may score",
        ),
        (
            {"kind": "ensemble", "paths": ["models/reward", "models/referee"]},
            ConfigError,
            "must not be trained on",
        ),
        ({"kind": "classifier", "model": "models/referee"}, ConfigError, "must not be trained on"),
        (
            {"kind": "model", "path": "extra/nothing"},
            ModelError,
            "no model folder at .*extra/nothing",
        ),
        ({"kind": "model", "path": "extra/foreign_lm"}, ModelError, "extra/foreign_lm"),
        (
            {"kind": "model", "path": "extra/foreign"},
            ModelError,
            "another tokenizer .* use it as kind classifier",
        ),
        (
            {"kind": "http", "url": "http://127.0.0.1:1", "retries": 0},
            DataError,
            "'http' .*127.0.0.1:1.* failed 1 tim",
        ),
    ],
    ids=str,
)
def test_what_cannot_score_is_refused_when_it_is_built(
    place: Place, source: dict[str, Any], error: type[RlhfError], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        build_reward_fn(sources({"kind": "model"}, source), place.context)


def test_another_path_to_the_own_model_is_the_own_model(place: Place) -> None:
    tokens = place.replies(TEXTS).tokens
    absolute = sources({"kind": "model", "path": str(Path(place.root, "extra/../models/reward"))})
    own = build_reward_fn(DEFAULT_SOURCES, place.context)
    assert torch.equal(build_reward_fn(absolute, place.context)(tokens), own(tokens))


@pytest.mark.parametrize(
    "values", [(1, 2.5), [1, 2.5], torch.tensor([1, 2.5]), torch.tensor([1, 2.5]).numpy()]
)
def test_any_sequence_of_numbers_will_do(place: Place, values: Any) -> None:
    assert checked_rewards(values, place.replies(["x", "y"]), "f").tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (None, "f gave NoneType for scores"),
        ("12", "f gave str for scores"),
        ([1.0], "f gave 1 scores for 2 replies"),
        ([1.0, math.nan], "score 1 is nan"),
        ([-math.inf, 1.0], "score 0 is -inf"),
        ([1.0, 10**400], "score 1 is 10000.*finite in single precision"),
        ([1.0, 1j], "score 1 is 1j, which is not a number"),
        ([[1.0], [2.0]], r"score 0 is \[1.0\], which is not a number"),
        ([False, 1.0], "score 0 is False, which is not a number"),
    ],
)
def test_anything_else_is_refused(place: Place, values: Any, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        checked_rewards(values, place.replies(["x", "y"]), "f")
