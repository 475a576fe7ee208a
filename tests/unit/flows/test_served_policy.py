"""What MLflow loads answers chat requests by the code of ``rlhf serve``, and scores by that of the evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from tiny_llama import tiny_config
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from flows.registry.model_pyfunc import LIMITS, RequestRefused, ServedModel
from flows.registry.stored_models import signature
from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.reply import Reply
from rlhf_core.models.causal_lm import save_policy, train_tokenizer
from rlhf_core.serving.completions import accept_request
from rlhf_core.serving.policy import LoadedPolicy
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision
from rlhf_core.serving.protocol import ChatRequest
from rlhf_core.storage.files import sha256_tree

JUDGED = SamplingConfig(max_new_tokens=8, temperature=1.3, top_p=0.6, repetition_penalty=2.0)
ASKED = [{"role": "user", "content": "what colour is the sky?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "the sky is blue."}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    tokenizer = train_tokenizer(["what colour is the sky? the sky is blue."] * 4, 280)
    config = tiny_config(tokenizer, initializer_range=0.4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_policy(root / "policy", LlamaForCausalLM(config).eval(), tokenizer)
        LlamaForSequenceClassification(config).save_pretrained(root / "reward")
    tokenizer.save_pretrained(root / "reward")
    return {kind: root / kind for kind in ("policy", "reward")}


def served(folder: Path) -> ServedModel:
    model = ServedModel()
    config = {"kind": folder.name, "content_sha256": sha256_tree(folder), "sampling": JUDGED.model_dump()}
    model.load_context(SimpleNamespace(model_config=config, artifacts={"hf": str(folder)}))
    return model


def ask(model: ServedModel, *conversations: Any, **params: Any) -> list[dict[str, Any]]:
    return model.predict(None, pandas.DataFrame({"messages": list(conversations)}), params)


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"max_tokens": 3, "top_p": 1.0}])
def test_a_request_is_answered_as_rlhf_serve_answers_it(folders: dict[str, Path], params: dict[str, Any]) -> None:
    policy = LoadedPolicy.load(PolicyRevision("policy"), PolicyFiles(folders["policy"], JUDGED))
    request = ChatRequest.model_validate({"messages": ASKED, "seed": 4, **params})
    accepted = accept_request(request, policy, LIMITS, 0)
    expected = accepted.response(policy.reply(accepted.prompt_ids, accepted.settings))
    # MLflow fills in what the signature names as default.
    defaults = {param.name: param.default for param in signature("policy", JUDGED.model_dump()).params.params}
    (answer,) = ask(served(folders["policy"]), ASKED, **{**defaults, "seed": 4, **params})
    assert answer.pop("reply") == expected["choices"][0]["message"]["content"]
    assert answer.keys() == expected.keys()
    assert (answer["choices"], answer["usage"]) == (expected["choices"], expected["usage"])


def test_a_reward_is_the_judges_score(folders: dict[str, Path]) -> None:
    judge = ModelJudge.load(folders["reward"], "reward")
    score = judge.score([[Message("user", ASKED[0]["content"])]], [Reply(ANSWERED[1]["content"], True)])[0]
    assert ask(served(folders["reward"]), ANSWERED, ANSWERED) == [{"score": pytest.approx(score)}] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "turns", "params", "reason"),
    [
        ("policy", ANSWERED, {}, "must end with a turn of role user"),
        ("policy", ASKED, {"max_tokens": 500}, "exceeds the 128 of the model's context"),
        ("policy", ASKED, {"temperature": float("nan")}, "NaN is not a JSON number"),
        ("reward", ASKED, {}, "must end with the turn of role assistant"),
        ("reward", ANSWERED[1:], {}, "messages is empty"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    folders: dict[str, Path], kind: str, turns: Any, params: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestRefused, match=reason) as refused:
        ask(served(folders[kind]), turns, **params)
    assert refused.value.get_http_status_code() == 400 and "\n" not in refused.value.message
