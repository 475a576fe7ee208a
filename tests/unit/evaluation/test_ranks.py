"""Evaluation on several ranks: the replies, scores and numbers of one process, whatever is
measured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from clean_files import write_rows
from ranks import run_ranks

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message, Preference, PretrainText, Prompt, read_table
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.perplexity import measure_drift, reply_log_likelihoods
from rlhf_core.evaluation.replies import evaluation_replies, on_policy_replies
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.runtime import distributed
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.stages.runtime.runner import run_stage
from rlhf_core.training.examples import Example

BATCH = 4


def evaluate(folder: Path, models: Path, texts: list[str]) -> None:
    """Everything that ranks share in an evaluation, written by each of them."""
    model, tokenizer = load_policy(models / "policy")
    reference, _ = load_policy(models / "sft")
    messages = [[Message("user", text)] for text in texts]
    config = SamplingConfig(max_new_tokens=12, top_p=0.9, repetition_penalty=1.1)
    seen: list[int] = []
    replies = evaluation_replies(
        model, tokenizer, messages, config, 1, seen.append, BATCH, replies_per_prompt=2
    )
    on_policy = on_policy_replies(
        model, tokenizer, messages, Sampling.for_tokenizer(tokenizer, 9), 2, BATCH
    )
    judge = ModelJudge.load(models / "reward", "reward", BATCH)
    examples = [Example([5, 6, 7], list(reply.token_ids)) for reply in replies]
    found: dict[str, Any] = {
        "replies": [asdict(reply) for reply in (*replies, *on_policy.replies)],
        "drift": asdict(measure_drift(on_policy, reference)),
        "scores": judge.score([m for m in messages for _ in range(2)], replies),
        "likelihoods": reply_log_likelihoods(model, examples, 0, 4),
        "seen": sum(seen),
    }
    (folder / f"{distributed.rank()}.json").write_text(json.dumps(found, sort_keys=True))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_evaluate_as_one_process(
    ranks: int, models: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    """With ten prompts in batches of four, some ranks have nothing in the last round."""
    texts = [
        " ".join([row.prompt[-1].content] * (1 + number % 3))
        for number, row in enumerate(prompts[:10])
    ]
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
        known, drift = alone["drift"], found["drift"]
        assert [reply["tokens"] for reply in drift["replies"]] == [
            reply["tokens"] for reply in known["replies"]
        ]
        for reply, same in zip(drift.pop("replies"), known["replies"], strict=True):
            for scores in ("logprobs", "reference_logprobs"):
                assert reply[scores] == pytest.approx(same[scores], rel=1e-12)
        assert drift == pytest.approx({name: known[name] for name in drift}, rel=1e-12)
        assert found["likelihoods"] == pytest.approx(alone["likelihoods"], rel=1e-12)


PARAMS = """
seed: 3
evaluate:
  prompts: 11
  replies_per_prompt: 2
  best_of_n: 2
  kl_samples: 7
  batch_size: 3
  max_new_tokens: 6
  bootstrap: 50
  sampling: {max_new_tokens: 6}
  multiple_choice: {files: [things_val.csv]}
  opponents: [{name: other, path: other.jsonl}]
"""
TWO = "compute: {launch: {evaluate: {processes: 2}}}\n"
QUESTIONS = "id,question,A,B,C,D,answer\n0,is it red?,yes,no,it is,not,A\n1,is the boat big?,a,b,c,d,C\n2,why?,e,f,g,h,B\n"


def numbers(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{path}{name}.")
        elif isinstance(value, int | float):
            yield f"{path}{name}", value


def evaluated(
    root: Path, models: Path, prompts: list[Prompt], params: str
) -> tuple[dict[str, float], list[Any]]:
    """Metrics and compared rows of the stage in a workspace with ``params``."""
    shutil.copytree(models, root / "models")
    (root / "samples").mkdir()
    for name in ("reward", "judge"):
        shutil.copy(models / f"{name}_scores.json", root / "samples")
    asked = [[Message("user", f"is it {'very ' * i}red?")] for i in range(6)]
    pairs = [
        Preference(str(i), asked[i], f"yes{' so' * (i % 3)}.", "no", None, "", "", "")
        for i in range(6)
    ]
    write_rows(root / "data/clean/prompts/test.parquet", prompts)
    write_rows(root / "data/clean/preferences/test.parquet", pairs)
    texts = [
        PretrainText(str(i), f"the boat {i} is red{' and green' * i}.", "", "", "")
        for i in range(5)
    ]
    write_rows(root / "data/clean/pretrain/validation.parquet", texts)
    (root / "things_val.csv").write_text(QUESTIONS)
    lines = [{"prompt": row.prompt[-1].content, "reply": "it is so"} for row in prompts]
    (root / "other.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "params.yaml").write_text(params)
    run_stage("evaluate", root)
    metrics = dict(numbers(json.loads((root / "metrics/evaluation.json").read_text())))
    return metrics, read_table(root / "samples/comparisons.parquet").to_pylist()


@pytest.mark.slow
def test_two_ranks_evaluate_as_one_process_does(
    tmp_path: Path, models: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_TRACKING", "off")
    one, rows = evaluated(tmp_path / "one", models, prompts, PARAMS)
    two, rows_of_two = evaluated(tmp_path / "two", models, prompts, PARAMS + TWO)
    assert two == pytest.approx(one, rel=1e-5, abs=1e-6)
    wanted = {
        "best_of_n.comparison.gold.win_rate",
        "opponents.other.prompts",
        "policy.multiple_choice.accuracy",
    }
    assert wanted <= one.keys()
    assert [len(rows), len(rows_of_two)] == [2 * min(11, len(prompts))] * 2
    for row, other in zip(rows, rows_of_two, strict=True):
        assert {name: value for name, value in row.items() if not isinstance(value, float)} == {
            name: value for name, value in other.items() if not isinstance(value, float)
        }, "the same replies"
    assert not (tmp_path / "two/.rlhf/ranks").exists() or not list(
        (tmp_path / "two/.rlhf/ranks").iterdir()
    )
