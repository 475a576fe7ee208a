"""What a tokenizer's chat template writes: dialogues as text, and what surrounds and ends an assistant's reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat.special_tokens import (
    CACHED_TOKENIZERS,
    encode_escaped,
    escape,
    special_tokens,
    token_id,
)
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError, ModelError, UnwritableText, first_line

QUESTION, ANSWER, NEXT_QUESTION = "What is that?", "It is this.", "And why?"
EXCERPT = 60
# What code in a template may raise: its own refusals, and Python's errors of what it does with the turns.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
# The day that templates write which ask for today's (Llama 3.2): the one that Llama's own fall back to. With the
# clock's, the same dialogue would be other tokens tomorrow, in a resumed run and beside results of today.
TODAY = datetime(2024, 7, 26)
# A macro of the function's name hides transformers' own, and needs no more than a template may do.
CLOCK = "strftime_now"
DATE_PARTS = ("-d", "-m", *"aAbBdHIjmMpSyY")
CLOCK_STOPPED = (
    f"{{%- macro {CLOCK}(format) -%}}{{{{- format"
    + "".join(f"|replace('%{part}', '{TODAY.strftime('%' + part)}')" for part in DATE_PARTS)
    + " -}}{%- endmacro -%}"
)
# Entry of tokenizer_config.json: the tokens that end a reply, also those that only the generation config names.
STOP_TOKENS = "stop_tokens"


@dataclass(frozen=True)
class ReplyFormat:
    """How the chat template writes an assistant's reply.

    Attributes:
        header: The end of the generation prompt, from its last special token or the end of the user's text on. A reply
            is tokenised behind it, since some tokenizers write the beginning of a text otherwise than its middle.
        header_ids: Its tokens.
        lead: What the template writes between the generation prompt and the reply: a space for Mistral, else nothing.
        tail: What it writes between the reply and the closing token: a space for Llama 2, else nothing.
        closing_id: The token that closes the turn.
        stop_ids: All tokens that end a sampled reply, ``closing_id`` first.
        strips: Whether the template removes whitespace at the beginning and at the end of a reply.
    """

    header: str
    header_ids: tuple[int, ...]
    lead: str
    tail: str
    closing_id: int
    stop_ids: tuple[int, ...]
    strips: tuple[bool, bool]

    def written(self, reply: str, finished: bool) -> str:
        """``reply`` as the template writes it behind the generation prompt, without the closing token."""
        if self.strips[0]:
            reply = reply.lstrip()
        if not finished:
            return self.lead + reply
        return self.lead + (reply.rstrip() if self.strips[1] else reply) + self.tail

    def read(self, text: str, finished: bool) -> str:
        """The reply in a text that follows the generation prompt: the inverse of :meth:`written`."""
        text = text.removeprefix(self.lead)
        return text.removesuffix(self.tail) if finished else text


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    """The dialogue as the chat template writes it; for a template that asks for it, today is :data:`TODAY`.

    Raises:
        ModelError: The tokenizer has no chat template.
        UnwritableText: The template refuses the dialogue; a few of its words say which one.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; give one with tokenizer.chat_template"
        )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        template = tokenizer.get_chat_template()
        if CLOCK in template:
            template = CLOCK_STOPPED + template
        written = tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(written)
    except TEMPLATE_ERRORS as error:
        refused = f"the chat template refuses a dialogue of the turns {', '.join(message.role for message in messages)}"
        cause = first_line(error)
        raise UnwritableText(
            f"{refused} ({messages[-1].content[:EXCERPT]!r}): {cause}; leave such dialogues out, or give the tokenizer "
            "a template that takes them",
            f"{refused}: {cause}",
        ) from error


def encode_rendered(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = False
) -> list[int]:
    """Token ids of :func:`render`. The template writes special tokens itself, so none is added: not a second BOS."""
    contents, placeholders = escape(tokenizer, [message.content for message in messages])
    escaped = [Message(message.role, content) for message, content in zip(messages, contents, strict=True)]
    return encode_escaped(tokenizer, render(tokenizer, escaped, add_generation_prompt), placeholders)


def reply_format(tokenizer: PreTrainedTokenizerBase) -> ReplyFormat:
    """Find how the template writes a reply, by rendering short dialogues.

    The closing token is the first special token that the template writes after the reply. A template that writes none,
    and a tokenizer without a template, close a reply with ``eos_token``.

    Raises:
        ModelError: No token closes a reply, or the template writes the header of a reply but not where
            ``add_generation_prompt`` asks for it.
        DataError: The template refuses a question and its answer.
    """
    declared = tuple(tokenizer.init_kwargs.get(STOP_TOKENS) or ())
    special = tuple(tokenizer.all_special_tokens)
    return _reply_format(
        tokenizer, (len(tokenizer), str(tokenizer.chat_template), special, tokenizer.eos_token), declared
    )


@lru_cache(maxsize=CACHED_TOKENIZERS)
def _reply_format(
    tokenizer: PreTrainedTokenizerBase, state: tuple[object, ...], declared: tuple[str, ...]
) -> ReplyFormat:
    """``state`` is what the format depends on besides ``declared``, the stop tokens that the tokenizer's files name."""
    header, lead, tail, closing, strips = "", "", "", None, (False, False)
    if tokenizer.chat_template:
        asked = [Message("user", QUESTION)]
        prompt = render(tokenizer, asked, add_generation_prompt=True)
        before, after = _around_answer(tokenizer, [*asked, Message("assistant", ANSWER)])
        padded = _around_answer(tokenizer, [*asked, Message("assistant", f"\n{ANSWER}\n")])
        strips = (padded[0] == before, padded[1] == after)
        specials = [match.start() for match in special_tokens(tokenizer).literal.finditer(prompt)]
        asked_until = prompt.rfind(QUESTION) + len(QUESTION) if QUESTION in prompt else 0
        header = prompt[max([asked_until, *specials[-1:]]) :]
        lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
        tail, closing = _closing(tokenizer, after)
        if closing is None:
            tail, closing = _closing(tokenizer, _before_next_turn(tokenizer))
    if special_tokens(tokenizer).literal.search(lead):
        raise ModelError(
            f"the chat template begins a reply with {lead!r}, but not where add_generation_prompt asks for it; give "
            "the tokenizer a template that does"
        )
    if closing is None:
        tail, closing = "", tokenizer.eos_token
    if closing is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, and its chat template closes no "
            "turn; a reply could never end"
        )
    names = dict.fromkeys([closing, *([tokenizer.eos_token] if tokenizer.eos_token else []), *declared])
    stop_ids = tuple(token_id(tokenizer, name) for name in names)
    header_ids = tuple(encode_escaped(tokenizer, header, {}))
    return ReplyFormat(header, header_ids, lead, tail, stop_ids[0], stop_ids, strips)


def refused_dialogues(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Which of ``a system turn`` and ``several turns`` the template refuses or leaves out, with the reason."""
    asked, answered = Message("user", QUESTION), Message("assistant", ANSWER)
    dialogues = {
        "a system turn": [Message("system", "Be brief."), asked],
        "several turns": [asked, answered, Message("user", NEXT_QUESTION)],
    }
    refused = {}
    for name, messages in dialogues.items():
        try:
            text = render(tokenizer, messages, add_generation_prompt=True)
        except DataError as error:
            refused[name] = str(error.__cause__).strip()
        else:
            if not all(message.content in text for message in messages):
                refused[name] = "it leaves it out"
    return refused


def bos_expression(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a template begins with for a model whose texts all begin with the same token; empty for others."""
    bos_id = tokenizer.bos_token_id
    return "{{ bos_token }}" if bos_id is not None and tokenizer.encode("a")[:1] == [bos_id] else ""


def _around_answer(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, str]:
    """What the template writes before and after the probe's answer."""
    before, answer, after = render(tokenizer, messages).partition(ANSWER)
    if not answer:
        raise ModelError("the chat template leaves an assistant's reply out; give the tokenizer another one")
    return before, after


def _closing(tokenizer: PreTrainedTokenizerBase, after: str) -> tuple[str, str | None]:
    """The text up to the first added token in ``after``, and that token; None where there is none."""
    names = {*tokenizer.all_special_tokens, *(token.content for token in tokenizer.added_tokens_decoder.values())}
    occurring = [(after.find(name), -len(name), name) for name in names if name in after]
    if not occurring:
        return "", None
    position, _, name = min(occurring)
    return after[:position], name


def _before_next_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template writes between an answer and the opening of the next turn: some close a turn only there.

    Empty where the template takes one question at a time.
    """
    asked = Message("user", QUESTION)
    messages = [asked, Message("assistant", ANSWER), Message("user", NEXT_QUESTION)]
    try:
        between = render(tokenizer, messages).partition(ANSWER)[2].partition(NEXT_QUESTION)[0]
    except DataError:
        return ""
    opening = render(tokenizer, [asked]).partition(QUESTION)[0]
    # The opening of a user's turn is what both have at their end, from a special token on.
    for match in special_tokens(tokenizer).literal.finditer(between):
        if opening.endswith(between[match.start() :]):
            return between[: match.start()]
    return between
