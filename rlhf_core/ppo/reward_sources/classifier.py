"""A Hugging Face sequence classifier as reward source.

Replies are encoded again by its own tokenizer and template.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core.config.reward_sources import ClassifierSource
from rlhf_core.data.chat_template import (
    encode_escaped,
    render_escaped,
    special_tokens,
    without_panics,
)
from rlhf_core.data.schema import Message
from rlhf_core.errors import ConfigError, DataError, first_line
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.foreign import require_openable
from rlhf_core.models.io import load_model, reading
from rlhf_core.ppo.reward_sources.source import Replies, checked_rewards

UNLIMITED = 10**6  # tokenizers without a limit say so by a huge number
Encoded = dict[str, list[int]]


class Classifier:
    """Rewards text by one output of a sequence classifier.

    Metric ``truncated``: share of the batch whose beginning did not fit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: ClassifierSource,
        who: str,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.who = who
        self.label = chosen_label(model.config, config.label, who)
        self.limit = token_limit(model, tokenizer, config.max_tokens)
        self.pad: int | None = model.config.get_text_config().pad_token_id
        self.accepted = set(inspect.signature(model.forward).parameters)
        self.metrics: dict[str, float] = {}
        if config.template == "chat" and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"{who}: its tokenizer has no chat template; set template to pair, reply, or a text"
            )

    def rewards(self, replies: Replies) -> Tensor:
        """(B,).

        Raises:
            DataError: The model cannot read a text, or gives a number that is not finite.
        """
        rows = []
        truncated = 0
        for prompt, reply in zip(replies.prompts, replies.texts, strict=True):
            row, is_cut = self.encode(prompt, reply)
            rows.append(row)
            truncated += is_cut
        self.metrics = {"truncated": truncated / len(rows)}
        return checked_rewards(self._scores(rows), replies, self.who)

    def encode(self, prompt: Sequence[Message], reply: str) -> tuple[Encoded, bool]:
        """The model's input for one reply, without padding, and whether its beginning was cut off.

        Special tokens that the prompt or the reply writes out are ordinary text, so that no policy
        learns to write a role or an end for its judge.
        """
        if self.config.template == "chat":
            whole = self._chat(prompt, reply)
            ids = whole
            if self.limit is not None:
                ids = whole[-self.limit :]
            is_cut = len(ids) < len(whole)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}, is_cut
        texts = self._texts(prompt, reply)
        # A text that names special tokens, such as "{prompt} [SEP] {reply}", means them.
        as_text = special_tokens(self.tokenizer).literal.search(self.config.template) is None
        with without_panics(reply):
            encoded = self.tokenizer(*texts, split_special_tokens=as_text, verbose=False)
        is_cut = self.limit is not None and len(encoded["input_ids"]) > self.limit
        if is_cut:
            encoded = self.tokenizer(
                *texts, split_special_tokens=as_text, truncation=True, max_length=self.limit
            )
        inputs = {name: list(ids) for name, ids in encoded.items() if name in self.accepted}
        return inputs, is_cut

    def _texts(self, prompt: Sequence[Message], reply: str) -> tuple[str, ...]:
        template = self.config.template
        if template == "pair":
            return plain_text(prompt), reply
        if template == "reply":
            return (reply,)
        # Piecewise, so that a reply which contains "{prompt}" stays what it is.
        parts = []
        for part in template.split("{reply}"):
            parts.append(part.replace("{prompt}", plain_text(prompt)))
        return (reply.join(parts),)

    def _chat(self, prompt: Sequence[Message], reply: str) -> list[int]:
        dialogue = [*prompt, Message("assistant", reply)]
        try:
            # The template writes special tokens itself, so none is added: not a second BOS.
            return encode_escaped(self.tokenizer, *render_escaped(self.tokenizer, dialogue))
        except DataError as error:
            raise DataError(
                f"{self.who}: {error}, or set another template of this source"
            ) from error

    @torch.inference_mode()
    def _scores(self, rows: Sequence[Encoded]) -> list[float]:
        """Scores in the order of ``rows``.

        Texts of similar length go together, and one by one without a pad token.
        """
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]))
        size = 1
        if self.pad is not None:
            size = self.config.batch_size
        scores = [0.0] * len(rows)
        for start in range(0, len(order), size):
            part = order[start : start + size]
            computed = self._forward([rows[row] for row in part]).tolist()
            for row, value in zip(part, computed, strict=True):
                scores[row] = value
        return scores

    def _forward(self, rows: Sequence[Encoded]) -> Tensor:
        width = max(len(row["input_ids"]) for row in rows)
        batch = {}
        for name in rows[0]:
            fill = 0
            if name == "input_ids":
                fill = self.pad or 0
            padded = [row[name] + [fill] * (width - len(row[name])) for row in rows]
            batch[name] = torch.tensor(padded)
        try:
            inputs = {name: values.to(self.model.device) for name, values in batch.items()}
            logits = self.model(**inputs).logits.float()
        except (IndexError, RuntimeError, ValueError) as error:
            raise DataError(
                f"{self.who}: the model cannot read a batch of {len(rows)} x {width} tokens ({first_line(error)}); set "
                "max_tokens to what it can read, or lower batch_size"
            ) from error
        return self._read(logits)

    def _read(self, logits: Tensor) -> Tensor:
        """(b, labels) -> (b,)."""
        if self.config.output == "logit":
            return logits[:, self.label]
        is_multi_label = self.model.config.problem_type == "multi_label_classification"
        if logits.shape[1] > 1 and not is_multi_label:
            probabilities = logits.softmax(dim=1)
        else:
            probabilities = logits.sigmoid()
        return probabilities[:, self.label]


def load_classifier(
    source: str | Path, config: ClassifierSource, device: torch.device, who: str
) -> Classifier:
    """Load the classifier of a folder or hub id: safetensors only, no remote code.

    Raises:
        ModelError: It cannot be loaded.
    """
    require_openable(source, config.revision, AutoModelForSequenceClassification)
    model: Any = load_model(AutoModelForSequenceClassification, source, None, config.revision)
    with reading(source):
        tokenizer = AutoTokenizer.from_pretrained(
            str(source), revision=config.revision, truncation_side="left", trust_remote_code=False
        )
    return Classifier(model.requires_grad_(False).to(device), tokenizer, config, who)


def chosen_label(config: Any, label: int | str | None, who: str) -> int:
    """Find the index of the output to read.

    Raises:
        ConfigError: There are several labels and none is chosen, or there is no such label.
    """
    names = {int(index): str(name) for index, name in config.id2label.items()}
    if label is None and config.num_labels == 1:
        return 0
    chosen: int | None = label if isinstance(label, int) else None
    if isinstance(label, str):
        chosen = next((index for index, name in names.items() if name == label), None)
    if chosen is None or not 0 <= chosen < config.num_labels:
        listed = ", ".join(f"{index} ({name})" for index, name in sorted(names.items()))
        problem = f"it has no label {label!r}"
        if label is None:
            problem = "set label to one of its labels"
        raise ConfigError(
            f"{who}: the classifier has {config.num_labels} labels, {listed}; {problem}"
        )
    return chosen


def token_limit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: int | None
) -> int | None:
    """The most tokens that model and tokenizer take, or ``given``.

    None when nothing limits them.
    """
    limits = [given, positions_of(model.config)]
    if tokenizer.model_max_length < UNLIMITED:
        limits.append(tokenizer.model_max_length)
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known, default=None)


def plain_text(prompt: Sequence[Message]) -> str:
    """Return a prompt as text: its one turn, or several with their roles.

    A blank line is between them.
    """
    if len(prompt) == 1:
        return prompt[0].content
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in prompt)
