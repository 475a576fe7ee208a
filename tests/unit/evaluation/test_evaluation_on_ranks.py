"""Evaluation on several ranks: replies, scores and perplexities have the bits of one process."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message, Prompt
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.perplexity import measure_drift, reply_perplexity
from rlhf_core.evaluation.replies import evaluation_replies, on_policy_replies
from rlhf_core.models.starting.base import load_policy
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.training.examples import Example

BATCH = 4


def evaluate(folder: Path, models: Path, texts: list[str]) -> None:
    """Everything that ranks share in an evaluation, written by each of them."""
    model, tokenizer = load_policy(models / "policy")
    reference, _ = load_policy(models / "sft")
    messages = [[Message("user", text)] for text in texts]
    config = SamplingConfig(max_new_tokens=12, top_p=0.9, repetition_penalty=1.1)
    seen: list[int] = []
    replies = evaluation_replies(model, tokenizer, messages, config, 1, seen.append, BATCH, replies_per_prompt=2)
    on_policy = on_policy_replies(model, tokenizer, messages, Sampling.for_tokenizer(tokenizer, 9), 2, BATCH)
    judge = ModelJudge.load(models / "reward", "reward", BATCH)
    examples = [Example([5, 6, 7], list(reply.token_ids)) for reply in replies]
    found: dict[str, Any] = {
        "replies": [asdict(reply) for reply in (*replies, *on_policy.replies)],
        "drift": asdict(measure_drift(on_policy, reference)),
        "scores": judge.score([m for m in messages for _ in range(2)], replies),
        "perplexity": reply_perplexity(model, examples, 0),
        "seen": sum(seen),
    }
    (folder / f"{distributed.rank()}.json").write_text(json.dumps(found, sort_keys=True))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_evaluate_as_one_process(ranks: int, models: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    """With ten prompts in batches of four, some ranks have nothing in the last round."""
    texts = [" ".join([row.prompt[-1].content] * (1 + number % 3)) for number, row in enumerate(prompts[:10])]
    evaluate(tmp_path, models, texts)
    run_ranks(evaluate, ranks, tmp_path / "ranks", models, texts)
    alone = json.loads((tmp_path / "0.json").read_text())
    assert alone["seen"] == 20 and len(alone["replies"]) == 30
    for rank in range(ranks):
        found = json.loads((tmp_path / f"ranks/{rank}.json").read_text())
        assert found.keys() == alone.keys()
        for exact in ("replies", "scores", "seen"):
            assert found[exact] == alone[exact]
        # Sums over ranks are taken in another order.
        assert found["drift"] == pytest.approx(alone["drift"], rel=1e-12)
        assert found["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-12)
