"""The reward model as MLflow serves it: a conversation that ends with the assistant's reply in, its score out.

MLflow copies this file into the model ("models from code") and runs it where the project may not be installed, so it
imports pandas, transformers, torch and mlflow only.
"""

from __future__ import annotations

from typing import Any

import mlflow
import pandas
import torch
from mlflow.pyfunc import PythonModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def conversations(table: pandas.DataFrame) -> list[list[dict[str, str]]]:
    """The conversations in a request; MLflow makes a table with the column ``messages`` of every form it accepts."""
    return [[{"role": m["role"], "content": m["content"]} for m in row] for row in table["messages"]]


class RewardModel(PythonModel):
    """Scores the last assistant turn of each conversation, as training does: at the token that ends the reply."""

    def load_context(self, context: Any) -> None:
        """Load the plain Hugging Face folder that is the artifact ``hf``."""
        folder = context.artifacts["hf"]
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        # Rows are scored one by one, without padding. With a pad token set, transformers would look for the last token
        # that is not padding, and skip the closing one where the two are the same.
        self.model.config.pad_token_id = None

    def predict(
        self, context: Any, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, float]]:
        """``{"score": float}`` per conversation of ``model_input``; each must end with an assistant turn."""
        with torch.inference_mode():
            return [{"score": self._score(messages)} for messages in conversations(model_input)]

    def _score(self, messages: list[dict[str, str]]) -> float:
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError("the conversation must end with the assistant turn that is to be scored")
        text = self.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += self.tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
        ids.append(self.tokenizer.eos_token_id)
        return float(self.model(input_ids=torch.tensor([ids])).logits[0, 0])


mlflow.models.set_model(RewardModel())
