"""A tiny workspace with models, prompts and demonstrations, and a real HTTP scorer on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from clean_files import write_rows
from scripted_server import Answer, post_server
from transformers import PreTrainedTokenizerBase
from unit.training.tiny import SHAPE, WORDS, demonstrations, text

from rlhf_core.config.base import BaseConfig
from rlhf_core.data.schema import Demonstration, Message, Prompt, content_id
from rlhf_core.data.tokens import encode_reply, left_pad, pad_id, right_pad
from rlhf_core.models.causal_lm import load_tokenizer, new_model, save_policy, train_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.ppo.reward_sources.build import SourceContext
from rlhf_core.ppo.reward_sources.source import PromptReader, Replies
from rlhf_core.ppo.rollout import TrainingPrompts
from rlhf_core.sampling.token_scoring import Tokens


@dataclass(frozen=True)
class Place:
    """A workspace, and replies in it."""

    root: Path

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.root / "models/sft")

    @cached_property
    def rows(self) -> list[Prompt]:
        return prompts(12)

    @property
    def context(self) -> SourceContext:
        prompts = TrainingPrompts.encode(self.tokenizer, [row.prompt for row in self.rows])
        reward, clean = self.root / "models/reward", self.root / "data/clean"
        return SourceContext(reward, clean, self.tokenizer, prompts, torch.device("cpu"))

    def replies(self, texts: Sequence[str], finished: Sequence[bool] | None = None) -> Replies:
        """Replies to the first prompts, as a rollout holds them."""
        prompts = self.context.prompts
        ids, mask = left_pad(prompts.ids[: len(texts)], pad_id(self.tokenizer))
        ends = finished if finished is not None else [True] * len(texts)
        encoded = [encode_reply(self.tokenizer, text) for text in texts]
        response = [row if end else row[:-1] for row, end in zip(encoded, ends, strict=True)]
        reply_ids, reply_mask = right_pad(response, pad_id(self.tokenizer))
        tokens = Tokens(
            torch.cat([ids, reply_ids], 1), torch.cat([mask, reply_mask], 1), reply_mask.bool()
        )
        return Replies(tokens, PromptReader(prompts), self.tokenizer)


def prompts(count: int) -> list[Prompt]:
    """Different prompts of one turn; the third has a system turn, the fourth a dialogue before
    it.
    """
    rows = []
    for i in range(count):
        turns = [Message("user", f"{i} {text(i, 1 + i % 5)}")]
        if i == 2:
            turns = [Message("system", "be red"), *turns]
        if i == 3:
            turns = [Message("user", "green"), Message("assistant", "a tree"), *turns]
        key = content_id("prompts", {"prompt": [vars(turn) for turn in turns]})
        rows.append(Prompt(key, turns, "fact", "test", str(i)))
    return rows


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Read-only for tests. ``extra/second`` is a reward model of the same tokens, ``extra/foreign``
    one of others.
    """
    root = tmp_path_factory.mktemp("place")
    rows = prompts(12)
    for split in ("train", "validation"):
        write_rows(root / "data/clean/prompts" / f"{split}.parquet", rows)
    write_rows(root / "data/clean/demonstrations/train.parquet", demonstrations(20))
    tokenizer = train_tokenizer([text(i, 5) for i in range(20)], SHAPE.vocab_size)
    for name in ("base", "sft"):
        save_policy(root / "models" / name, new_model(SHAPE, tokenizer, seed=1), tokenizer)
    for seed, name in enumerate(("models/reward", "models/referee", "extra/second"), start=1):
        ScalarModel.from_causal_lm(root / "models/sft", seed).save(root / name, tokenizer)
    other = train_tokenizer(["completely different words " + " ".join(reversed(WORDS))] * 3, 290)
    shape = BaseConfig(**(SHAPE.model_dump() | {"vocab_size": 290}))
    save_policy(root / "extra/foreign_lm", new_model(shape, other, seed=2), other)
    ScalarModel.from_causal_lm(root / "extra/foreign_lm", 4).save(root / "extra/foreign", other)
    (root / "gates").mkdir()
    (root / "gates/reward.pass").write_text("passed\n")
    return Place(root)


def demonstration(i: int) -> Demonstration:
    """The ``i``-th demonstration of the workspace."""
    return demonstrations(i + 1)[i]


@dataclass
class Scorer:
    """A real server. ``script`` answers the requests in turn, then ``score`` does; a raw str is
    sent as it is.
    """

    url: str = ""
    score: Callable[[dict[str, Any]], float] = lambda item: float(len(item["reply"]))
    script: list[Answer | threading.Event] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def answer(self, body: dict[str, Any]) -> Answer:
        """What the next request is told; an event in the script holds the request until it is
        set.
        """
        self.requests.append(body)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, threading.Event):
            step.wait()
        elif step is not None:
            return step
        return 200, {"scores": [self.score(item) for item in body["items"]]}


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    """A scorer on a free port of 127.0.0.1."""
    state = Scorer()

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        state.headers.append(headers)
        return state.answer(body)

    with post_server(answer) as address:
        state.url = f"{address}/score"
        yield state
