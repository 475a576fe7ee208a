"""How a reward function is called: whole or single, plain or asynchronous, with columns, and within
which time.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.ppo.reward_sources.functions import FunctionReward, PythonFunction, columns_read
from rlhf_core.ppo.reward_sources.source import (
    PromptReader,
    RankShared,
    Replies,
    RewardMixture,
    WeightedSource,
)

from .conftest import Place

ANSWERS = {"answer": [f"a{n}" for n in range(12)], "level": list(range(12))}


def with_columns(place: Place, texts: list[str]) -> Replies:
    replies = place.replies(texts)
    reader = PromptReader(replace(replies.reader.prompts, columns=ANSWERS))
    return Replies(replies.tokens, reader, replies.tokenizer)


def called(given: Any, place: Place, texts: list[str]) -> list[float]:
    return PythonFunction(given, "f", list(ANSWERS)).rewards(with_columns(place, texts)).tolist()


def batch(prompts: Any, replies: list[str], answer: list[str], level: list[int]) -> list[float]:
    return [
        float(reply == right) + number
        for reply, right, number in zip(replies, answer, level, strict=True)
    ]


def everything(prompts: Any, replies: list[str], **columns: list[Any]) -> list[float]:
    return batch(prompts, replies, columns["answer"], columns["level"])


def single(
    prompt: list[dict[str, str]], reply: str, answer: str, *, level: int, unknown: int = 5
) -> float:
    assert prompt[-1]["role"] == "user" and unknown == 5
    return float(reply == answer) + level


async def batch_async(
    prompts: Any, replies: list[str], answer: list[str], level: list[int]
) -> list[float]:
    await asyncio.sleep(0)
    return batch(prompts, replies, answer, level)


async def single_async(prompt: Any, reply: str, answer: str, level: int) -> float:
    await asyncio.sleep(0)
    return single(prompt, reply, answer, level=level)


class Scorer:
    async def __call__(
        self, prompts: Any, replies: list[str], answer: list[str], level: list[int]
    ) -> list[float]:
        return await batch_async(prompts, replies, answer, level)


KINDS: dict[str, Any] = {
    "batch": batch,
    "all columns": everything,
    "bound": functools.partial(batch, level=[0, 1, 2]),
    "single": FunctionReward(single, call="single"),
    "single within a time": FunctionReward(single, call="single", timeout_seconds=60.0),
    "async": batch_async,
    "async object": Scorer(),
    "async single": FunctionReward(single_async, call="single", timeout_seconds=60.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_function_gets_the_columns_that_it_names(kind: str, place: Place) -> None:
    assert called(KINDS[kind], place, ["a0", "red", "a2"]) == [1.0, 1.0, 3.0]


def test_a_notebook_runs_an_event_loop_already(place: Place) -> None:
    async def cell() -> list[float]:
        return called(batch_async, place, ["a0"])

    assert asyncio.run(cell()) == [1.0]


def test_a_column_that_the_records_lack_is_refused_before_training() -> None:
    with pytest.raises(
        ConfigError, match=r"f asks for answer, which .* do not have; their columns: level, source"
    ):
        columns_read(batch, ["level", "source"], "f")
    assert columns_read(len, ["level"], "f") == ()


@pytest.mark.parametrize("call", ["batch", "single"])
def test_none_says_that_a_reply_cannot_be_scored(call: Any, place: Place) -> None:
    def whole(prompts: Any, replies: list[str]) -> list[float | None]:
        return [None if reply == "red" else 2.0 for reply in replies]

    def one(prompt: Any, reply: str) -> float | None:
        return whole([prompt], [reply])[0]

    source = PythonFunction(FunctionReward(whole if call == "batch" else one, call=call), "f")
    mixture = RewardMixture(
        [WeightedSource("f", 1.0, RankShared(source))], place.replies(["x"]).reader, place.tokenizer
    )
    rewards = mixture(place.replies(["blue", "red", "green", "big"]).tokens)
    assert rewards.isnan().tolist() == [False, True, False, False]
    assert mixture.unscored is not None and mixture.unscored.tolist() == rewards.isnan().tolist()
    assert mixture.metrics == {"unscored": 0.25}


def test_a_single_reply_that_takes_too_long_cannot_be_scored(place: Place) -> None:
    def slow(prompt: Any, reply: str) -> float:
        while reply == "red":
            time.sleep(0.01)
        return 1.0

    async def slow_async(prompt: Any, reply: str) -> float:
        while reply == "red":
            await asyncio.sleep(0.01)
        return 1.0

    for function in (slow, slow_async):
        source = PythonFunction(FunctionReward(function, call="single", timeout_seconds=0.2), "f")
        rewards = source.rewards(place.replies(["blue", "red"]))
        assert rewards.isnan().tolist() == [False, True]
        assert source.metrics == {"timeouts": 0.5}


def test_a_batch_that_takes_too_long_ends_the_run(place: Place) -> None:
    def slow(prompts: Any, replies: Any) -> list[float]:
        while True:
            time.sleep(0.01)

    async def slow_async(prompts: Any, replies: Any) -> list[float]:
        while True:
            await asyncio.sleep(0.01)

    for function in (slow, slow_async):
        source = PythonFunction(FunctionReward(function, timeout_seconds=0.2), "f")
        with pytest.raises(DataError, match=r"f took more than 0\.2 s"):
            source.rewards(place.replies(["blue"]))


def test_what_a_function_raises_is_named_with_the_reply(place: Place) -> None:
    def breaks(prompt: Any, reply: str) -> float:
        return 1.0 / (reply != "red")

    async def breaks_async(prompt: Any, reply: str) -> float:
        raise TimeoutError("of a server")

    with pytest.raises(DataError, match=r"f raised ZeroDivisionError: .*scoring 'red'"):
        PythonFunction(FunctionReward(breaks, call="single"), "f").rewards(
            place.replies(["blue", "red"])
        )
    with pytest.raises(DataError, match="f raised TimeoutError: of a server"):
        PythonFunction(FunctionReward(breaks_async, call="single"), "f").rewards(
            place.replies(["blue"])
        )
