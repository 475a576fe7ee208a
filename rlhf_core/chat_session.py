"""A conversation with a model folder: the engine of ``rlhf chat``."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.chat import decode_reply, encode_prompt
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError
from rlhf_core.models.base import load_policy
from rlhf_core.sampling.distribution import EvaluationSampling, philox_uniforms
from rlhf_core.sampling.generation import evaluation_generate

HELP = "/reset forgets the conversation, /quit (or end of input) leaves, anything else is said to the model"


class ChatSession:
    """A conversation of several turns. The same seed and the same turns give the same replies."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingConfig,
        seed: int = 0,
        system: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.sampling, self.seed = model, tokenizer, sampling, seed
        self.system = [Message("system", system)] if system else []
        self.turns: list[Message] = []
        self.forgotten = 0
        self._asked = 0

    @classmethod
    def open(
        cls, folder: Path, sampling: SamplingConfig | None = None, seed: int = 0, system: str | None = None
    ) -> ChatSession:
        """Load a Hugging Face folder; ``ModelError`` when it is missing or incomplete."""
        model, tokenizer = load_policy(folder)
        return cls(model, tokenizer, sampling or SamplingConfig(), seed, system)

    def reset(self) -> None:
        """Forget the conversation; the system turn stays."""
        self.turns, self.forgotten = [], 0

    def say(self, text: str) -> str:
        """The model's reply to ``text``, which joins the conversation.

        Where the model's context is full the oldest turns are forgotten (``forgotten`` counts them). ``DataError`` when
        ``text`` alone does not fit; the conversation then stays as it was.
        """
        turns = [*self.turns, Message("user", text)]
        ids, turns = self._fit(turns)
        uniforms = philox_uniforms(self.seed, [self._asked], self.sampling.max_new_tokens)
        sampling = EvaluationSampling.for_tokenizer(self.tokenizer, self.sampling)
        rollout = evaluation_generate(self.model, [ids], uniforms, sampling)
        reply, _ = decode_reply(self.tokenizer, rollout.replies()[0])
        reply = reply.strip()
        self._asked += 1
        self.turns = [*turns, Message("assistant", reply)]
        return reply

    def _fit(self, turns: list[Message]) -> tuple[list[int], list[Message]]:
        """Token ids of as many of the last turns as leave room for a reply, and those turns."""
        context = getattr(self.model.config, "max_position_embeddings", None)
        dropped = 0
        while True:
            ids = encode_prompt(self.tokenizer, [*self.system, *turns[dropped:]])
            if context is None or len(ids) + self.sampling.max_new_tokens <= context:
                self.forgotten += dropped
                return ids, turns[dropped:]
            if dropped + 2 >= len(turns):
                room = context - self.sampling.max_new_tokens
                raise DataError(f"that is {len(ids)} tokens; the model's context has room for {max(room, 0)}")
            dropped += 2  # a question goes with its answer


def converse(session: ChatSession, source: TextIO, sink: TextIO) -> int:
    """Talk until ``/quit`` or the end of ``source``; returns how many replies were given.

    On a terminal there is a prompt and the commands are explained. Otherwise each line of input gives exactly one line
    of output (line breaks inside a reply become spaces), so that questions can be piped in.
    """
    terminal = source.isatty()
    given = 0
    if terminal:
        _tell(sink, HELP)
    while True:
        if terminal:
            sink.write("you> ")
            sink.flush()
        line = source.readline()
        text = line.strip()
        if not line or text == "/quit":
            return given
        if text == "/reset":
            session.reset()
        elif text == "/help":
            _tell(sink, HELP)
        elif text:
            _tell(sink, ("model> " if terminal else "") + _reply(session, text, terminal))
            given += 1


def _reply(session: ChatSession, text: str, terminal: bool) -> str:
    """A turn that does not fit is refused in place; in a pipe it ends the program, where nobody reads along."""
    before = session.forgotten
    try:
        reply = session.say(text)
    except DataError as error:
        if not terminal:
            raise
        return f"({error})"
    note = " (the oldest turns no longer fit and are forgotten)" if terminal and session.forgotten > before else ""
    return " ".join(reply.split()) + note


def _tell(sink: TextIO, text: str) -> None:
    sink.write(text + "\n")
    sink.flush()
