"""The LLM judge in the evaluate stage, in a match, in the report and for gates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from clean_files import write_rows

from rlhf_core.config.evaluation import LlmJudgeConfig, SafetyConfig
from rlhf_core.config.gates import Condition
from rlhf_core.data.schema import Prompt, read_table
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation.match import run_match
from rlhf_core.evaluation.report.view import reply_pair
from rlhf_core.gates import check
from rlhf_core.stages.runtime.contract import Paths

from ..conftest import made_prompt
from ..test_evaluate_stage import CONFIG, run_stage
from .conftest import ChatServer, completion

PROMPTS = [made_prompt(f"what is {i} and {i}?", f"sums {i % 2}", "a file") for i in range(6)]


def stage(root: Path, models: Path, **judge: Any) -> tuple[dict[str, Any], Paths]:
    update = {"prompts": 6, "kl_samples": 2, "best_of_n": 2, "safety": SafetyConfig(prompts=0)}
    config = CONFIG.model_copy(
        update=update | {"llm_judge": LlmJudgeConfig(model="m", concurrency=1, **judge)}
    )
    return run_stage(root, models, PROMPTS, config)


def test_the_llm_judge_in_the_stage_goes_on_where_it_stopped(
    tmp_path: Path, models: Path, server: ChatServer
) -> None:
    server.script = [(200, completion(server.say("longer", "short"))), (404, "no model m")]
    with pytest.raises(DataError, match="no model m"):
        stage(tmp_path, models, base_url=server.base_url)
    server.script = [(200, completion("no idea"))]
    metrics, outputs = stage(tmp_path, models, base_url=server.base_url, max_junk=0.2)
    assert len({json.dumps(request) for request in server.requests}) == len(server.requests) - 1, (
        "one was asked again"
    )
    llm, judge = metrics["comparison"]["llm"], metrics["llm_judge"]
    assert (
        llm["prompts"] == 5 and judge["pairs"] == 6 and judge["junk_share"] == pytest.approx(1 / 6)
    )
    rows = read_table(outputs.comparisons).to_pylist()
    by_hand = [(len(row["policy_reply"]) > len(row["sft_reply"])) * 1.0 for row in rows]
    known = [(row["llm_outcome"], expected) for row, expected in zip(rows, by_hand, strict=True)
             if row["llm_outcome"] not in (None, 0.5)]  # fmt: skip
    assert known and all(outcome == expected for outcome, expected in known)
    outcomes = [row["llm_outcome"] for row in rows if row["llm_outcome"] is not None]
    assert llm["win_rate"] == pytest.approx(sum(outcomes) / 5)
    assert 0 <= llm["lc_win_rate_low95"] <= llm["lc_win_rate"] <= 1 and "mean_difference" not in llm
    assert (
        "llm" not in metrics["best_of_n"]["comparison"]
        and "win_rate_llm" in metrics["category"]["sums 0"]
    )
    condition = Condition(
        metric="comparison.llm.lc_win_rate_low95", at_least=0.0, why="a gate can use it"
    )
    assert check(condition, metrics).passed
    assert {reply_pair(row)["llm"] for row in rows} > {"no usable answer"}


def test_a_missing_key_stops_the_stage_before_it_samples(tmp_path: Path, models: Path) -> None:
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        stage(tmp_path, models / "none", base_url="http://127.0.0.1:9/v1", token_env="NO_SUCH_KEY")


def test_a_match_has_the_llm_judge_beside_the_model(
    tmp_path: Path, models: Path, server: ChatServer
) -> None:
    shutil.copytree(models, tmp_path / "models")
    rows: list[Prompt] = PROMPTS[:3]
    write_rows(tmp_path / "data/clean/prompts/test.parquet", rows)
    (tmp_path / "params.yaml").write_text(
        "seed: 1\nevaluate: {prompts: 3, bootstrap: 50, max_new_tokens: 5, sampling: {max_new_tokens: 5}, "
        f"safety: {{prompts: 0}}, llm_judge: {{base_url: '{server.base_url}', model: m}}}}\n"
    )
    result = run_match(tmp_path, models / "sft", models / "policy")
    assert (
        set(result["comparison"]) == {"judge", "llm"}
        and result["comparison"]["llm"]["prompts"] == 3
    )
    assert (tmp_path / ".rlhf/llm_judge").is_dir()
    asked = len(server.requests)
    assert (
        run_match(tmp_path, models / "sft", models / "policy") == result
        and len(server.requests) == asked
    )
