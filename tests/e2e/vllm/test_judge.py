"""The LLM judge against a real server: vLLM with SmolLM2-135M-Instruct, which answers in the form
that is enforced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from smollm2 import needs_smollm2
from vllm_service import VLLM_MARKS, VllmService

from rlhf_core.config.evaluation import LlmJudgeConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError
from rlhf_core.evaluation.replies import Reply
from rlhf_extras.evaluations.llm_judge import LlmJudge

pytestmark = [*VLLM_MARKS, needs_smollm2]
PROMPTS = [[Message("user", f"What is {i} plus {i}?")] for i in range(1, 7)]
RIGHT = [Reply(f"{i} plus {i} is {2 * i}.", True) for i in range(1, 7)]
WRONG = [Reply("I like trains trains trains trains.", True) for _ in range(1, 7)]


@pytest.fixture
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> VllmService:
    service: VllmService = request.getfixturevalue("champion_in_vllm").service
    monkeypatch.setenv("JUDGE_TOKEN", str(service.token))
    return service


def judge_config(service: VllmService, **fields: Any) -> LlmJudgeConfig:
    asked = {"base_url": f"{service.url}/v1", "model": service.model, "token_env": "JUDGE_TOKEN"}
    return LlmJudgeConfig.model_validate(asked | fields)


def test_every_answer_has_the_form_that_is_enforced_and_is_asked_for_once(
    service: VllmService, tmp_path: Path
) -> None:
    config = judge_config(service, response_format="json_schema", max_junk=0.5)
    judged = LlmJudge(config, tmp_path).judge(PROMPTS, RIGHT, WRONG)
    assert (
        judged.metrics["prompt_tokens"] > 12 * 150
        and 0 < judged.metrics["completion_tokens"] <= 12 * 256
    )
    assert set(judged.outcomes[judged.judged]) <= {1.0, 0.5, 0.0}
    print(f"{dict(judged.metrics)}, outcomes {judged.outcomes.tolist()}")
    away = config.model_copy(update={"retries": 0})
    again = LlmJudge(away, tmp_path)
    again.endpoint.url = "http://127.0.0.1:9/v1/chat/completions"
    assert again.judge(PROMPTS, RIGHT, WRONG).reasons == judged.reasons, (
        "no further question is asked"
    )


def test_an_unknown_model_stops_with_one_line(service: VllmService, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"answered 404 .*check base_url, model and token_env"):
        LlmJudge(judge_config(service, model="none"), tmp_path).judge(PROMPTS, RIGHT, WRONG)
