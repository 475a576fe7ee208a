"""A conversation with a model folder: the engine of ``rlhf chat``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from rich.cells import cell_len
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.model import SamplingConfig
from rlhf_core.data.schema import Message, Prompt, read_rows
from rlhf_core.data.text import for_terminal, is_encodable
from rlhf_core.data.tokens import encode_prompt
from rlhf_core.errors import DataError
from rlhf_core.models.architecture import positions_of
from rlhf_core.models.causal_lm import load_policy
from rlhf_core.models.foreign import require_openable
from rlhf_core.sampling.decoding import decoding_layers
from rlhf_core.sampling.distribution import EvaluationSampling, philox_uniforms
from rlhf_core.sampling.reply import OnText, ReplyPieces, sample_reply

PROMPT = "you> "
HELP = "/reset forgets the conversation, /help shows this, /quit or end of input leaves"


class ChatSession:
    """A conversation of several turns. The same seed and the same turns give the same replies."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingConfig,
        seed: int = 0,
    ) -> None:
        self.model, self.tokenizer, self.sampling, self.seed = model, tokenizer, sampling, seed
        self.turns: list[Message] = []
        self.forgotten = 0
        self._asked = 0

    @classmethod
    def open(
        cls, folder: Path, sampling: SamplingConfig | None = None, seed: int = 0
    ) -> ChatSession:
        """Load a Hugging Face folder; ``ModelError`` when it is missing or incomplete."""
        require_openable(folder)
        model, tokenizer = load_policy(folder)
        # What is too long is forgotten or refused; the library would warn of it.
        tokenizer.model_max_length = sys.maxsize
        return cls(model, tokenizer, sampling or SamplingConfig(), seed)

    def reset(self) -> None:
        """Forget the conversation."""
        self.turns, self.forgotten = [], 0

    def say(self, text: str, on_text: OnText | None = None) -> str:
        """Return the model's reply to ``text``, which joins the conversation.

        ``on_text`` is called with each piece of the reply as it is sampled, on one line. Where the
        model's context is full the oldest turns are forgotten (``forgotten`` counts them).
        ``DataError`` when ``text`` alone does not fit or is not UTF-8; the conversation then stays
        as it was.
        """
        if not is_encodable(text):
            raise DataError(
                "that line is not UTF-8; save the input as UTF-8, or set the terminal to it"
            )
        turns = [*self.turns, Message("user", text)]
        ids, turns = self._fit(turns)
        uniforms = philox_uniforms(self.seed, [self._asked], self.sampling.max_new_tokens)
        sampling = EvaluationSampling.for_tokenizer(self.tokenizer, self.sampling)
        pieces = ReplyPieces()

        def write(text: str) -> None:
            if on_text is not None and (piece := pieces.rest(one_line(text))):
                on_text(piece)

        with decoding_layers(self.model, 1, self.sampling.max_new_tokens):
            followed = write if on_text is not None else None
            sampled = sample_reply(self.model, self.tokenizer, ids, sampling, uniforms, followed)
        reply = sampled.text.strip()
        write(reply)
        # Knowing the end, the tokenizer may decode the beginning in another way.
        if on_text is not None and pieces.sent != one_line(reply):
            on_text(f"\n{one_line(reply)}")
        self._asked += 1
        self.turns = [*turns, Message("assistant", reply)]
        return reply

    def _fit(self, turns: list[Message]) -> tuple[list[int], list[Message]]:
        """Return as many of the last turns as leave room for a reply, after their token ids."""
        context = positions_of(self.model.config)
        dropped = 0
        while True:
            ids = encode_prompt(self.tokenizer, turns[dropped:])
            if context is None or len(ids) + self.sampling.max_new_tokens <= context:
                self.forgotten += dropped
                return ids, turns[dropped:]
            if dropped + 2 >= len(turns):
                room = context - self.sampling.max_new_tokens
                raise DataError(
                    f"that is {len(ids)} tokens; the model's context has room for {max(room, 0)}"
                )
            dropped += 2  # a question goes with its answer


def one_line(text: str) -> str:
    """Return ``text`` with every run of spaces and line breaks as one space."""
    return " ".join(text.split())


def converse(
    session: ChatSession,
    source: TextIO,
    sink: TextIO,
    introduction: Sequence[str] = (),
    ask: Callable[[str], str] | None = None,
) -> int:
    """Talk until ``/quit`` or the end of ``source``; returns how many replies were given.

    On a terminal there is a prompt, replies appear as they are sampled, and ``introduction`` and
    the commands are printed first. Otherwise each line of input gives exactly one line of output,
    so that questions can be piped in.

    Args:
        ask: Reads a line of a terminal behind a prompt, empty at the end of input; by default from
            ``source``.
    """
    terminal = source.isatty()
    given = 0

    def write(text: str) -> None:
        sink.write(for_terminal(text))  # a model may have learned to write control characters
        sink.flush()

    if terminal:
        write("\n".join([*introduction, HELP, ""]))
    while True:
        if terminal and ask is not None:
            line = ask(PROMPT)
        else:
            write(PROMPT if terminal else "")
            line = source.readline()
        text = line.strip()
        if not line or text == "/quit":
            return given
        if text == "/reset":
            session.reset()
        elif text == "/help":
            write(f"{HELP}\n")
        elif text and not terminal:
            write(f"{one_line(session.say(text))}\n")  # a turn that does not fit ends the program
        elif text:
            before = session.forgotten
            write("model> ")
            try:
                session.say(text, write)
            except DataError as error:  # the turn is refused, and the conversation goes on
                write(f"({error})")
            if session.forgotten > before:
                write(" (the oldest turns no longer fit and are forgotten)")
            write("\n")
        given += bool(text) and text not in ("/reset", "/help")


TEST_PROMPTS = Path("data") / "clean" / "prompts" / "test.parquet"
LONGEST = 70  # columns, so that a prompt fits into a line; a Chinese character takes two


def prompts_to_try(workspace: Path, count: int = 3) -> list[str]:
    """Return up to ``count`` held-out prompts of one short line; none without data.

    The first prompt of each category comes before further ones.
    """
    try:
        rows = read_rows(workspace / TEST_PROMPTS, Prompt)
    except DataError:
        return []
    first_of_category: dict[str, str] = {}
    suitable = []
    for row in rows:
        text = row.prompt[0].content.strip()
        if len(row.prompt) == 1 and 0 < cell_len(text) <= LONGEST and text.isprintable():
            suitable.append(text)
            first_of_category.setdefault(row.category, text)
    chosen = dict.fromkeys([*first_of_category.values(), *suitable])
    return list(chosen)[:count]
