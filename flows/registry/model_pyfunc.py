"""The policy and the reward model as MLflow serves them: conversations in, chat completions or rewards out.

MLflow copies this file into the model ("models from code") and runs it where the project may not be installed, so it
imports mlflow, pandas, torch, transformers and jinja2 only.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import mlflow
import pandas
import torch
from jinja2 import TemplateError
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, INVALID_STATE
from mlflow.pyfunc import PythonModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
)

ROLES = ("system", "user", "assistant")
Conversation = list[dict[str, str]]


class RequestRefused(MlflowException):
    """A request that cannot be answered: its message is one line, and the scoring server answers with status 400."""

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


class ServedConversations(Protocol):
    """What answers conversations: one result per conversation."""

    def answer(self, conversations: list[Conversation], params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Raises :class:`RequestRefused` for a request that cannot be answered."""


class ServedModel(PythonModel):
    """The policy or the reward model, by ``kind`` of the model's configuration."""

    def load_context(self, context: Any) -> None:
        """Load the plain Hugging Face folder that is the artifact ``hf``; refused if its content has changed."""
        config = context.model_config
        folder = Path(context.artifacts["hf"])
        if content_sha256(folder) != config["content_sha256"]:
            raise MlflowException(
                "the model's files are not the ones that were registered and judged; register the model again",
                error_code=INVALID_STATE,
            )
        kind = ServedPolicy if config["kind"] == "policy" else ServedRewardModel
        self.served: ServedConversations = kind(folder, config.get("sampling") or {})

    def predict(
        self, context: Any, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Answer every conversation of ``model_input``; MLflow makes a table of every form of request it accepts."""
        rows = [
            [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in row]
            for row in model_input["messages"]
        ]
        return self.served.answer(rows, params or {})


class GeneratedTokenPenalty(LogitsProcessor):
    """Repetition penalty over the tokens generated so far, as the evaluation applies it (Keskar et al. 2019).

    The penalty of transformers counts the tokens of the prompt too.
    """

    def __init__(self, penalty: float, prompt_length: int) -> None:
        self.penalty, self.prompt_length = penalty, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, L), (B, V) -> (B, V)."""
        generated = input_ids[:, self.prompt_length :]
        logits = scores.gather(1, generated)
        return scores.scatter(1, generated, torch.where(logits > 0, logits / self.penalty, logits * self.penalty))


class ChatEncoder:
    """Conversations as token ids, as in training.

    The chat template's own special tokens are control tokens; those that a turn writes out are ordinary text. The
    tokenizer names the tokens that end a reply, that which closes a turn first, where they are not its ``eos_token``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        names = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
        self.special_ids = {name: int(tokenizer.convert_tokens_to_ids(name)) for name in names}
        self.pattern = re.compile("|".join(map(re.escape, names)))
        stops = tokenizer.init_kwargs.get("stop_tokens") or [tokenizer.eos_token]
        self.stop_ids = [int(tokenizer.convert_tokens_to_ids(name)) for name in stops]

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Token ids up to where the assistant's reply begins; :class:`RequestRefused` if the template refuses."""
        escaped, placeholders = self._escaped(conversation)
        return self._encode(self._render(escaped, generation_prompt=True), placeholders)

    def answered_ids(self, conversation: Conversation) -> list[int]:
        """Token ids up to and with the token that closes the last turn, which is the assistant's."""
        escaped, placeholders = self._escaped(conversation)
        prompt = self._render(escaped[:-1], generation_prompt=True)
        whole = self._render(escaped, generation_prompt=False)
        reply = whole[len(prompt) :] if whole.startswith(prompt) else escaped[-1]["content"]
        closing = self.pattern.search(reply)
        text = reply[: closing.start()] if closing else escaped[-1]["content"]
        prompt_ids, ids = self._encode(prompt, placeholders), self._encode(prompt + text, placeholders)
        if ids[: len(prompt_ids)] != prompt_ids:  # the reply's first characters merged with the template's last
            ids = prompt_ids + self._encode(text, placeholders)
        return [*ids, self.stop_ids[0]]

    def _escaped(self, conversation: Conversation) -> tuple[Conversation, dict[str, str]]:
        """The turns with a private-use character for each special token that they write out, and those characters."""
        contents = "".join(turn["content"] for turn in conversation)
        unused = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in contents)
        placeholders = dict(zip(sorted(set(self.pattern.findall(contents))), unused, strict=False))
        turns = [
            {**turn, "content": self.pattern.sub(lambda match: placeholders[match.group()], turn["content"])}
            for turn in conversation
        ]
        return turns, {character: token for token, character in placeholders.items()}

    def _render(self, turns: Conversation, generation_prompt: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt)
            )
        except TemplateError as error:
            raise RequestRefused(f"the model's chat template refuses the conversation: {error}") from error

    def _encode(self, text: str, placeholders: Mapping[str, str]) -> list[int]:
        if not placeholders:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        start = 0
        for match in [*self.pattern.finditer(text), None]:
            piece = text[start : match.start() if match else len(text)]
            for character, token in placeholders.items():
                piece = piece.replace(character, token)
            ids += self.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True) if piece else []
            if match:
                ids.append(self.special_ids[match.group()])
                start = match.end()
        return ids


class ServedPolicy:
    """Samples one reply per conversation, by default as it was judged.

    A seed of 0 or more makes the answer repeatable; temperature 0 is greedy.
    """

    def __init__(self, folder: Path, sampling: Mapping[str, Any]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.defaults = {**sampling, "seed": -1}
        self.chat = ChatEncoder(self.tokenizer)
        # The model may have more entries than the tokenizer, which cannot write those as text.
        spare = range(max(self.tokenizer.get_vocab().values()) + 1, self.model.get_input_embeddings().num_embeddings)
        self.suppressed = sorted({*self.chat.special_ids.values(), *spare} - {*self.chat.stop_ids})

    def answer(self, conversations: list[Conversation], params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One chat completion (``choices``, ``usage``) per conversation."""
        settings = {**self.defaults, **{key: value for key, value in params.items() if value is not None}}
        _check_settings(settings)
        for conversation in conversations:
            check_conversation(conversation, last="user")
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            if settings["seed"] >= 0:
                torch.manual_seed(settings["seed"])
            return [self._complete(conversation, settings) for conversation in conversations]

    def _complete(self, conversation: Conversation, settings: Mapping[str, Any]) -> dict[str, Any]:
        ids = torch.tensor([self.chat.prompt_ids(conversation)])
        self._check_room(ids.shape[1], settings["max_new_tokens"])
        new = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **self.generate_arguments(ids.shape[1], settings)
        )[0, ids.shape[1] :].tolist()
        end = next((position for position, token in enumerate(new) if token in self.chat.stop_ids), None)
        reply = str(self.tokenizer.decode(new[:end]))
        if end is None:
            reply = reply.rstrip("\N{REPLACEMENT CHARACTER}")  # the first bytes of a character that was cut off
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": reply.strip()},
            "logprobs": None,
            "finish_reason": "length" if end is None else "stop",
        }
        counts = {"prompt_tokens": ids.shape[1], "completion_tokens": len(new)}
        usage = {**counts, "total_tokens": sum(counts.values())}
        return {"object": "chat.completion", "choices": [choice], "usage": usage}

    def generate_arguments(self, prompt_length: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of ``generate`` that sample as the evaluation does: penalty, temperature, then top-p."""
        penalty = GeneratedTokenPenalty(settings["repetition_penalty"], prompt_length)
        arguments: dict[str, Any] = {
            "max_new_tokens": settings["max_new_tokens"],
            "eos_token_id": self.chat.stop_ids,
            "pad_token_id": self.chat.stop_ids[0],
            "suppress_tokens": self.suppressed or None,
            "logits_processor": LogitsProcessorList([penalty]),
            "repetition_penalty": 1.0,
            "do_sample": settings["temperature"] > 0,
        }
        if settings["temperature"] > 0:
            arguments |= {"temperature": settings["temperature"], "top_p": settings["top_p"], "top_k": 0}
        return arguments

    def _check_room(self, prompt: int, new: int) -> None:
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None and prompt + new > positions:
            raise RequestRefused(
                f"the conversation has {prompt} tokens; with max_new_tokens {new} that exceeds the {positions} "
                "positions of the model: shorten one of them"
            )


class ServedRewardModel:
    """Scores the last assistant turn of each conversation, as training does: at the token that ends the reply."""

    def __init__(self, folder: Path, _: Mapping[str, Any]) -> None:
        self.chat = ChatEncoder(AutoTokenizer.from_pretrained(folder))
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        # Rows are scored one by one, without padding. With a pad token set, transformers would look for the last token
        # that is not padding, and skip the closing one where the two are the same.
        self.model.config.pad_token_id = None

    def answer(self, conversations: list[Conversation], _: Mapping[str, Any]) -> list[dict[str, Any]]:
        """``{"score": float}`` per conversation; each must end with an assistant turn."""
        for conversation in conversations:
            check_conversation(conversation, last="assistant")
        with torch.inference_mode():
            return [{"score": self._score(conversation)} for conversation in conversations]

    def _score(self, conversation: Conversation) -> float:
        ids = self.chat.answered_ids(conversation)
        return float(self.model(input_ids=torch.tensor([ids])).logits[0, 0])


def check_conversation(conversation: Conversation, last: str) -> None:
    """:class:`RequestRefused` unless the conversation has known roles, some content, and ends with a ``last`` turn."""
    if not conversation:
        raise RequestRefused("messages is empty; give at least one turn {role, content}")
    for number, turn in enumerate(conversation):
        if turn["role"] not in ROLES:
            raise RequestRefused(f"messages[{number}].role is {turn['role']!r}; it must be one of {', '.join(ROLES)}")
        if not turn["content"].strip():
            raise RequestRefused(f"messages[{number}].content is empty")
        if turn["role"] == "system" and number > 0:
            raise RequestRefused(f"messages[{number}] is a system turn; only the first turn may be one")
    if conversation[-1]["role"] != last:
        raise RequestRefused(f"messages must end with a turn of role {last}, not {conversation[-1]['role']}")


def _check_settings(settings: Mapping[str, Any]) -> None:
    if settings["max_new_tokens"] < 1:
        raise RequestRefused(f"max_new_tokens is {settings['max_new_tokens']}; it must be at least 1")
    if not (math.isfinite(settings["temperature"]) and settings["temperature"] >= 0):
        raise RequestRefused(f"temperature is {settings['temperature']}; it must be 0 (greedy) or above")
    if not 0 < settings["top_p"] <= 1:
        raise RequestRefused(f"top_p is {settings['top_p']}; it must be above 0 and at most 1")
    if not (math.isfinite(settings["repetition_penalty"]) and settings["repetition_penalty"] > 0):
        raise RequestRefused(f"repetition_penalty is {settings['repetition_penalty']}; it must be above 0")


def content_sha256(folder: Path) -> str:
    """Hash of a folder's relative file names and contents in sorted order, as it was taken at registration."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


mlflow.models.set_model(ServedModel())
