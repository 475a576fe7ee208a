"""The HTTP scorer against a real server: batches, retries, refusals, secrets."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ppo.reward_sources.functions import PluggedSource
from rlhf_extras.http_rewards import HttpScorer, HttpSource

from .conftest import Place, Scorer

TEXTS = ["red", "the sky is blue", "", "green", "a tree"]


def client(scorer: Scorer, waits: list[float] | None = None, **changes: Any) -> PluggedSource:
    config = HttpSource.model_validate({"kind": "http", "url": scorer.url, "retries": 3} | changes)
    who = "reward source 'http'"
    scorer_of_http = HttpScorer(config, who, (waits if waits is not None else []).append)
    return PluggedSource(scorer_of_http, who)


def test_items_hold_prompt_reply_and_end_in_batches(place: Place, scorer: Scorer) -> None:
    replies = place.replies(TEXTS, finished=[True, False, True, True, True])
    scores = client(scorer, batch_size=2).rewards(replies)
    assert scores.tolist() == [3.0, 15.0, 0.0, 5.0, 6.0]
    assert [len(request["items"]) for request in scorer.requests] == [2, 2, 1]
    items = [item for request in scorer.requests for item in request["items"]]
    assert items[1] == {"prompt": [{"role": "user", "content": "1 big near"}], "reply": TEXTS[1],
                        "finished": False}  # fmt: skip
    assert [turn["role"] for turn in items[3]["prompt"]] == ["user", "assistant", "user"]


def test_errors_of_the_server_are_retried_with_growing_waits(place: Place, scorer: Scorer) -> None:
    scorer.script = [
        (500, "no"),
        (503, "busy", {"Retry-After": "7"}),
        (429, "later", {"Retry-After": "soon"}),
    ]
    waits: list[float] = []
    assert client(scorer, waits).rewards(place.replies(["red"])).tolist() == [3.0]
    assert waits == [0.5, 7.0, 2.0] and len(scorer.requests) == 4


@pytest.mark.parametrize(
    "status", [408, 425, 502, 507, 522, 529], ids=str
)  # 522 and 529 are those of gateways
def test_a_status_of_passing_trouble_is_retried(place: Place, scorer: Scorer, status: int) -> None:
    scorer.script = [(status, "busy")]
    assert client(scorer).rewards(place.replies(["red"])).tolist() == [3.0]


def test_waits_are_bounded(place: Place, scorer: Scorer) -> None:
    scorer.script = [(503, "", {"Retry-After": "86400"})] + [(500, "")] * 8
    waits: list[float] = []
    client(scorer, waits, retries=9).rewards(place.replies(["red"]))
    assert waits == [60.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_request_that_times_out_is_repeated(place: Place, scorer: Scorer) -> None:
    hold = threading.Event()
    scorer.script = [hold]
    waits: list[float] = []
    try:
        assert client(scorer, waits, timeout_seconds=0.3).rewards(
            place.replies(["red"])
        ).tolist() == [3.0]
    finally:
        hold.set()
    assert waits == [0.5] and len(scorer.requests) == 2


def test_a_scorer_that_stays_away_is_told_with_attempts_and_the_last_problem(
    place: Place, scorer: Scorer
) -> None:
    scorer.script = [(500, "out of memory")] * 4
    with pytest.raises(
        DataError, match=r"'http' failed 4 times, at last with answered 500 'out of memory'; .*last"
    ):
        client(scorer).rewards(place.replies(["red"]))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((404, "no such page"), "answered 404 'no such page'; status 200"),
        ((302, "", {"Location": "http://127.0.0.1:1/"}), "answered 302"),
        ((200, "hello"), "answered 200 'hello'; a JSON object with a list 'scores'"),
        ((200, [1.0, 2.0]), "a list 'scores'"),
        ((200, {"scores": 1.0}), "a list 'scores'"),
        ((200, {"scores": [1.0]}), "gave 1 scores for 2 items"),
        ((200, {"scores": [1.0, 2.0, 3.0]}), "gave 3 scores for 2 items"),
        ((200, '{"scores": [1.0, NaN]}'), "score 1 is nan; scores must be finite"),
        ((200, '{"scores": [1.0, 1e39]}'), "score 1 is 1e\\+39; scores must be finite in single"),
        ((200, {"scores": ["high", 1.0]}), "score 0 is 'high', which is not a number"),
        ((200, {"scores": [None, 1.0]}), "score 0 is None"),
        ((200, {"scores": [True, 1.0]}), "score 0 is True"),
        ((200, '{"scores": ' + "[" * 100_000), "a list 'scores'"),
        ((200, "hello", {"Content-Type": "text/plain; charset=hex"}), "answered 200 'hello'"),
    ],
)
def test_a_broken_contract_is_refused_at_once(
    place: Place, scorer: Scorer, answer: Any, expected: str
) -> None:
    scorer.script = [answer]
    waits: list[float] = []
    with pytest.raises(DataError, match=expected):
        client(scorer, waits).rewards(place.replies(["red", "blue"]))
    assert waits == [] and len(scorer.requests) == 1


@pytest.mark.parametrize(
    ("size", "pause"), [(1, 0.02), (1 << 20, 0)], ids=["a byte now and then", "a flood"]
)
def test_an_answer_without_end_is_broken_off(
    place: Place, scorer: Scorer, size: int, pause: float
) -> None:
    scorer.script = [(200, (time.sleep(pause) or b" " * size for _ in range(1000)))]
    assert client(scorer, timeout_seconds=0.5).rewards(place.replies(["red"])).tolist() == [3.0]
    assert len(scorer.requests) == 2


def test_a_wrong_count_cannot_be_made_up_by_another_batch(place: Place, scorer: Scorer) -> None:
    scorer.script = [(200, {"scores": [1.0]}), (200, {"scores": [1.0, 2.0]})]
    with pytest.raises(DataError, match="gave 1 scores for 2 items"):
        client(scorer, batch_size=2).rewards(place.replies(["red", "blue", "green"]))


def test_the_environments_token_shows_nowhere(
    place: Place, scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="variable SCORER_TOKEN, named by token_env, is not set"):
        client(scorer, token_env="SCORER_TOKEN")
    monkeypatch.setenv("SCORER_TOKEN", "s3cret")
    client(scorer, token_env="SCORER_TOKEN").rewards(place.replies(["red"]))
    assert scorer.headers[0]["Authorization"] == "Bearer s3cret"
    scorer.script = [(401, "Bearer s3cret is not welcome")]
    with pytest.raises(DataError) as caught:
        client(scorer, token_env="SCORER_TOKEN").rewards(place.replies(["red"]))
    assert "is not welcome" in str(caught.value) and "s3cret" not in str(caught.value)
    client(scorer).rewards(place.replies(["red"]))
    assert "Authorization" not in scorer.headers[-1]


@pytest.mark.parametrize("value", ["two words", "line\nbreak", "schlüssel"])
def test_a_token_that_cannot_be_sent_stays_unseen(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SCORER_TOKEN", value)
    with pytest.raises(ConfigError, match="cannot be a bearer token") as caught:
        client(scorer, token_env="SCORER_TOKEN")
    assert value not in str(caught.value)
