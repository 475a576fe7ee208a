"""The policy as MLflow serves it: chat in, chat completion out.

MLflow copies this file into the model ("models from code") and runs it where the project may not be installed, so it
imports pandas, transformers, torch and mlflow only.
"""

from __future__ import annotations

from typing import Any

import mlflow
import pandas
import torch
from mlflow.pyfunc import PythonModel
from transformers import AutoModelForCausalLM, AutoTokenizer

DEFAULTS = {"max_new_tokens": 64, "temperature": 0.8, "top_p": 0.9, "seed": -1}


def conversations(table: pandas.DataFrame) -> list[list[dict[str, str]]]:
    """The conversations in a request; MLflow makes a table with the column ``messages`` of every form it accepts."""
    return [[{"role": m["role"], "content": m["content"]} for m in row] for row in table["messages"]]


class PolicyModel(PythonModel):
    """Samples one reply per conversation. A seed of 0 or more makes the answer repeatable; temperature 0 is greedy."""

    def load_context(self, context: Any) -> None:
        """Load the plain Hugging Face folder that is the artifact ``hf``."""
        folder = context.artifacts["hf"]
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def predict(
        self, context: Any, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """One chat completion (``choices``, ``usage``) per conversation of ``model_input``."""
        settings = {**DEFAULTS, **(params or {})}
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            if settings["seed"] >= 0:
                torch.manual_seed(settings["seed"])
            return [self._answer(messages, settings) for messages in conversations(model_input)]

    def _answer(self, messages: list[dict[str, str]], settings: dict[str, Any]) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        sampling: dict[str, Any] = {"do_sample": False}
        if settings["temperature"] > 0:
            sampling = {
                "do_sample": True,
                "temperature": settings["temperature"],
                "top_p": settings["top_p"],
                "top_k": 0,
            }
        end = self.tokenizer.eos_token_id
        new = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=int(settings["max_new_tokens"]),
            eos_token_id=end,
            pad_token_id=end,
            **sampling,
        )[0, ids.shape[1] :].tolist()
        finished = end in new
        reply = str(self.tokenizer.decode(new[: new.index(end)] if finished else new, skip_special_tokens=True)).strip()
        return {
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": reply},
                    "finish_reason": "stop" if finished else "length",
                }
            ],
            "usage": {"prompt_tokens": ids.shape[1], "completion_tokens": len(new)},
        }


mlflow.models.set_model(PolicyModel())
