"""The policy and the reward model as MLflow serves them: chat requests in, replies or scores out.

MLflow copies this file into the model ("models from code"). What answers is the installed
``rlhf_core``, by the same functions as ``rlhf serve`` and the evaluation.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import pandas
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, INVALID_STATE
from mlflow.pyfunc import PythonModel

from rlhf_core.config.model import SamplingConfig
from rlhf_core.errors import DataError
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.replies import Reply
from rlhf_core.serving.accepted import accept_request
from rlhf_core.serving.policy import LoadedPolicy
from rlhf_core.serving.policy_source import PolicyFiles, PolicyRevision
from rlhf_core.serving.protocol import ApiError, ServingLimits, parse_chat_request
from rlhf_core.storage.files import sha256_tree

LIMITS = ServingLimits(max_new_tokens=sys.maxsize)  # the model's context alone limits a reply


class RequestRefused(MlflowException):
    """A request that cannot be answered; the scoring server sends its one line with status 400."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        super().__init__(reason, error_code=INVALID_PARAMETER_VALUE)

    @property
    def message(self) -> str:
        """The reason alone: the scoring server would put the whole request in front of it."""
        return self._reason

    @message.setter
    def message(self, _: str) -> None:
        return


class ServedModel(PythonModel):
    """The policy or the reward model, by ``kind`` of the model's configuration."""

    def load_context(self, context: Any) -> None:
        """Load the Hugging Face folder that is the artifact ``hf``, unless it has changed."""
        config, folder = context.model_config, Path(context.artifacts["hf"])
        if sha256_tree(folder) != config["content_sha256"]:
            raise MlflowException(
                "the model's files are not the ones that were registered and judged; register the model again",
                error_code=INVALID_STATE,
            )
        self.sampling = SamplingConfig(**config["sampling"])
        self.policy: LoadedPolicy | None = None
        if config["kind"] == "policy":
            self.policy = LoadedPolicy.load(
                PolicyRevision(config["kind"]), PolicyFiles(folder, self.sampling)
            )
        else:
            self.judge = ModelJudge.load(folder, config["kind"])

    def predict(
        self, context: Any, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """A chat completion, or a score, for every conversation of ``model_input``."""
        judged = self.sampling.model_dump()
        judged |= {"max_tokens": self.sampling.max_new_tokens, "seed": -1}
        settings = {}
        for name, value in (params or {}).items():
            if value != judged.get(name):
                settings[name] = value
        answers = []
        try:
            for row in model_input["messages"]:
                turns = [{"role": turn["role"], "content": turn["content"]} for turn in row]
                if self.policy is None:
                    answers.append(self._score(turns))
                else:
                    answers.append(self._complete(turns, settings))
            return answers
        except (ApiError, DataError) as error:
            raise RequestRefused(str(error)) from error

    def _complete(self, turns: list[dict[str, str]], settings: Mapping[str, Any]) -> dict[str, Any]:
        """The chat completion, and its text as ``reply``, which MLflow's evaluation looks for."""
        assert self.policy is not None
        request = parse_chat_request(json.dumps({"messages": turns, **settings}).encode())
        accepted = accept_request(request, self.policy, LIMITS, int(time.time()))
        reply = self.policy.reply(accepted.prompt_ids, accepted.settings)
        return {**accepted.response(reply), "reply": reply.text}

    def _score(self, turns: list[dict[str, str]]) -> dict[str, Any]:
        """The reward of the last turn, which ends as a finished reply does."""
        if not turns or turns[-1]["role"] != "assistant":
            raise RequestRefused(
                "messages must end with the turn of role assistant that is to be scored"
            )
        request = parse_chat_request(json.dumps({"messages": turns[:-1]}).encode())
        return {
            "score": self.judge.score([request.dialogue], [Reply(turns[-1]["content"], True)])[0]
        }


mlflow.models.set_model(ServedModel())
