"""Chat templates and special tokens of a tokenizer: what a conversation looks like to a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.schema import Message
from rlhf_core.data.template_process import EndlessTemplate, templates
from rlhf_core.errors import DataError, ModelError, UnwritableText, first_line, is_panic
from rlhf_core.runtime.untrusted_text import string_literals

# A private-use plane of Unicode: characters that stand for special tokens inside contents.
PLACEHOLDERS = range(0xF0000, 0xFFFFE)
CACHED_TOKENIZERS = 16


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
        ids: Their ids by their text.
        literal: Matches the text of one of them, the longest first.
        pattern: The same, with the whitespace that some of them absorb.
    """

    ids: Mapping[str, int]
    literal: re.Pattern[str]
    pattern: re.Pattern[str]


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Return the id of one token; that of the unknown token if the vocabulary lacks it."""
    index = tokenizer.convert_tokens_to_ids(token)
    return index if isinstance(index, int) else index[0]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return all added tokens that are marked special, and those with a role such as eos."""
    return _special_tokens(tokenizer, (len(tokenizer), *tokenizer.all_special_tokens))


@lru_cache(maxsize=CACHED_TOKENIZERS)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, state: tuple[object, ...]) -> SpecialTokens:
    """Return them; ``state`` is what changes with the tokenizer's special tokens."""
    added = {}
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            added[token.content] = token
    names = sorted({*added, *tokenizer.all_special_tokens}, key=lambda name: (-len(name), name))
    literals = []
    patterns = []
    for name in names:
        literal = pattern = re.escape(name)
        if name in added and added[name].lstrip:
            pattern = r"\s*" + pattern
        if name in added and added[name].rstrip:
            pattern += r"\s*"
        literals.append(literal)
        patterns.append(pattern)
    return SpecialTokens(
        ids={name: token_id(tokenizer, name) for name in names},
        literal=re.compile("|".join(literals) or "(?!)"),
        pattern=re.compile("|".join(patterns) or "(?!)"),
    )


def escape(
    tokenizer: PreTrainedTokenizerBase, contents: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Replace special tokens written out in ``contents`` by characters that no content has.

    Returns:
        The contents, and the token that each of the characters stands for: none in ordinary texts.
    """
    literal = special_tokens(tokenizer).literal
    written: set[str] = set()
    for content in contents:
        written.update(literal.findall(content))
    if not written:
        return list(contents), {}
    occurring = set("".join(contents))
    unused = (chr(code) for code in PLACEHOLDERS if chr(code) not in occurring)
    placeholders = dict(zip(sorted(written), unused, strict=False))
    escaped = [literal.sub(lambda match: placeholders[match[0]], text) for text in contents]
    return escaped, {placeholder: token for token, placeholder in placeholders.items()}


@contextmanager
def without_panics(text: str) -> Iterator[None]:
    """Turn a panic of the tokenizers' library over ``text`` into an error for users.

    It gives up where the pattern by which a tokenizer splits texts needs too many steps.

    Raises:
        UnwritableText: It gave up.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        reason = f"the tokenizer gives up on a text ({first_line(error)})"
        raise UnwritableText(
            f"{reason}: take it out of the data ({text[:EXCERPT]!r}…), or take another model",
            reason,
        ) from error


def encode_escaped(
    tokenizer: PreTrainedTokenizerBase, text: str, placeholders: Mapping[str, str]
) -> list[int]:
    """Return token ids of a text in which only ``placeholders`` stand for ordinary special tokens.

    Special tokens that stand in it themselves are control tokens. No token is added at the
    beginning or the end.

    Raises:
        UnwritableText: The tokenizer cannot write the text of a special token as ordinary text.
    """
    if not placeholders:
        with without_panics(text):
            return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    special = special_tokens(tokenizer)
    ids: list[int] = []
    start = 0
    for match in special.pattern.finditer(text):
        ids += _encode_plain(tokenizer, text[start : match.start()], placeholders)
        ids.append(special.ids[special.literal.findall(match.group())[0]])
        start = match.end()
    return ids + _encode_plain(tokenizer, text[start:], placeholders)


def _encode_plain(
    tokenizer: PreTrainedTokenizerBase, text: str, placeholders: Mapping[str, str]
) -> list[int]:
    """Return token ids of text between two control tokens, none of which is a special token."""
    if not text:
        return []
    for placeholder, token in placeholders.items():
        text = text.replace(placeholder, token)
    with without_panics(text):
        ids = list(
            tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
        )
    control = set(ids) & set(special_tokens(tokenizer).ids.values()) - {tokenizer.unk_token_id}
    if control:
        written = str(tokenizer.convert_ids_to_tokens(min(control)))
        reason = (
            f"a text contains {written!r}, which this tokenizer cannot write but as a control token"
        )
        raise UnwritableText(f"{reason}: take it out of the data ({text[:40]!r}…)", reason)
    return ids


QUESTION = "What is that?"
ANSWER = "It is this."
NEXT_QUESTION = "And why?"
REASONED = f"<think>\nLet me see.\n</think>\n\n{ANSWER}"
SYSTEM_TURN = "a system turn"
SEVERAL_TURNS = "several turns"
REASONING_BEFORE = "reasoning in an earlier reply"
EXCERPT = 60
# The day that templates write which ask for today's (Llama 3.2): the one that Llama's own fall back
# to. With the clock's, the same dialogue would become other tokens tomorrow: resumed runs and
# comparisons would differ.
TODAY = datetime(2024, 7, 26)
# A macro of the function's name hides transformers' own, and needs no more than a template may do.
CLOCK = "strftime_now"
DATE_PARTS = ("-d", "-m", *"aAbBdHIjmMpSyY")
CLOCK_STOPPED = (
    f"{{%- macro {CLOCK}(format) -%}}{{{{- format"
    + "".join(f"|replace('%{part}', '{TODAY.strftime('%' + part)}')" for part in DATE_PARTS)
    + " -}}{%- endmacro -%}"
)
# Entry of tokenizer_config.json: the tokens that end a reply, also those that only the generation
# config names.
STOP_TOKENS = "stop_tokens"


@dataclass(frozen=True)
class ReplyFormat:
    """How the chat template writes an assistant's reply.

    Attributes:
        header: The end of the generation prompt, from its last special token or the end of the
            user's text on. A reply is tokenised behind it, since some tokenizers write the
            beginning of a text otherwise than its middle.
        lead: What the template writes between the generation prompt and the reply: a space for
            Mistral, else nothing.
        tail: What it writes between the reply and the closing token: a space for Llama 2, else
            nothing.
        stop_ids: All tokens that end a sampled reply, ``closing_id`` first.
        strips: Whether the template removes whitespace at the beginning and at the end of a reply.
        after: All that it writes behind a reply: ``tail``, the closing token if that is always
            written, and the rest.
        markers: Texts that it may look for in a reply, such as ``</think>``, to write what
            surrounds them otherwise.
        unfit: Kinds of dialogues in which it writes a reply otherwise than behind its generation
            prompt.
    """

    header: str
    header_ids: tuple[int, ...]
    lead: str
    tail: str
    closing_id: int
    stop_ids: tuple[int, ...]
    strips: tuple[bool, bool]
    after: str = ""
    markers: tuple[str, ...] = ()
    unfit: frozenset[str] = frozenset()

    def is_marked(self, reply: str) -> bool:
        """Whether only the template can tell how it writes ``reply``: see :func:`written_reply`."""
        return any(marker in reply for marker in self.markers)

    def require_fit(self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> None:
        """Raise ``UnwritableText`` for a prompt behind which a reply is written otherwise."""
        kinds: Collection[str] = ()
        if self.unfit:
            kinds = self.unfit & self.kinds(messages)
        if not kinds:  # a turn may switch reasoning on or off, as /no_think does for some
            turns = [message.content for message in messages if message.role != "assistant"]
            text = "\0".join(turns)
            markers = [marker for marker in self.markers if marker in text]
            if markers and not _goes_on(tokenizer, _escaped(tokenizer, messages)[0], self.lead):
                kinds = [f"a turn with {max(markers, key=len)!r}"]
        if kinds:
            reason = (
                f"behind {min(kinds)} the chat template writes a reply otherwise than its "
                "generation prompt begins it"
            )
            raise UnwritableText(
                f"{reason}: leave such dialogues out, or give the tokenizer another template",
                reason,
            )

    def kinds(self, messages: Sequence[Message]) -> set[str]:
        """Return which of the kinds that :attr:`unfit` may name a dialogue is of."""
        earlier = [message for message in messages if message.role == "assistant"]
        names = set()
        if messages[:1] and messages[0].role == "system":
            names.add(SYSTEM_TURN)
        if earlier:
            names.add(SEVERAL_TURNS)
        if any(self.is_marked(message.content) for message in earlier):
            names.add(REASONING_BEFORE)
        return names

    def written(self, reply: str, finished: bool) -> str:
        """Return a reply as the template writes it, without the closing token."""
        if self.strips[0]:
            reply = reply.lstrip()
        if not finished:
            return self.lead + reply
        if self.strips[1]:
            reply = reply.rstrip()
        return self.lead + reply + self.tail

    def read(self, text: str, finished: bool) -> str:
        """Return the reply in what follows the generation prompt: the inverse of :meth:`written`."""
        text = text.removeprefix(self.lead)
        return text.removesuffix(self.tail) if finished else text


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
) -> str:
    """Return the dialogue as the chat template writes it.

    For a template that asks for it, today is :data:`TODAY`.

    Raises:
        ModelError: The tokenizer has no chat template, or one that does not end, or writes without
            end.
        UnwritableText: The template refuses the dialogue; a few of its words say which one.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; give one with tokenizer.chat_template"
        )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return render_turns(tokenizer, turns, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        roles = ", ".join(message.role for message in messages)
        refused = f"the chat template refuses a dialogue of the turns {roles}"
        cause = first_line(error)
        raise UnwritableText(
            f"{refused} ({messages[-1].content[:EXCERPT]!r}): {cause}; leave such dialogues out, or give the tokenizer "
            "a template that takes them",
            f"{refused}: {cause}",
        ) from error


def render_turns(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, Any]], **arguments: Any
) -> str:
    """Return what ``tokenizer.apply_chat_template`` writes of the turns, within limits.

    Raises:
        TemplateError: The template refuses them.
        ModelError: It does not end, or writes without end.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates, and none that is the default
        raise TemplateError(str(error)) from error
    if CLOCK in template:
        template = CLOCK_STOPPED + template
    try:
        return templates.write(template, turns, **tokenizer.special_tokens_map, **arguments)
    except EndlessTemplate as error:
        raise ModelError(
            f"the chat template {error} for a dialogue of {len(turns)} turns "
            f"({str(turns[-1].get('content'))[:EXCERPT]!r}); it is damaged, or made to do harm: take another model"
        ) from error


def written_reply(tokenizer: PreTrainedTokenizerBase, reply: str, finished: bool) -> str:
    """Return a reply as the template writes it behind the generation prompt, before its end.

    A finished reply with one of the markers is written by the template itself: reasoning that
    stands in the reply would otherwise follow the empty block that some templates write. One that
    was cut off stays as it was sampled.

    Raises:
        UnwritableText: The template does not write it behind its generation prompt, or leaves a
            part of it out.
    """
    form = reply_format(tokenizer)
    if not form.is_marked(reply):
        return form.written(reply, finished)
    if not finished:
        opens_itself = form.lead.strip() and reply.lstrip().startswith(form.lead.split()[0])
        return reply if opens_itself else form.written(reply, finished)
    asked = [Message("user", QUESTION)]
    prompt = render(tokenizer, asked, True)
    whole = render(tokenizer, [*asked, Message("assistant", reply)])
    surrounded = whole.startswith(prompt) and whole.endswith(form.after)
    if not surrounded or len(whole) < len(prompt) + len(form.after):
        reason = "the chat template does not write a reply with such markers behind its generation prompt"
        raise UnwritableText(f"{reason} ({reply[:EXCERPT]!r}): take them out of the data", reason)
    written = whole[len(prompt) : len(whole) - len(form.after)] + form.tail
    # Where reasoning begins may be in the generation prompt already.
    if _without_whitespace(reply) not in _without_whitespace(form.header + written):
        marker = max((each for each in form.markers if each in reply), key=len)
        reason = f"the chat template leaves out a part of a reply with {marker!r}, which would not be learned"
        raise UnwritableText(
            f"{reason} ({reply[:EXCERPT]!r}): take that part out of the data, or give the tokenizer a template that "
            "keeps the last reply whole",
            reason,
        )
    return written


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


def render_escaped(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
) -> tuple[str, dict[str, str]]:
    """Return :func:`render` of a dialogue with special tokens escaped, and their placeholders."""
    escaped, placeholders = _escaped(tokenizer, messages)
    return render(tokenizer, escaped, add_generation_prompt), placeholders


def _escaped(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[Message], dict[str, str]]:
    contents, placeholders = escape(tokenizer, [message.content for message in messages])
    escaped = []
    for message, content in zip(messages, contents, strict=True):
        escaped.append(Message(message.role, content))
    return escaped, placeholders


def reply_format(tokenizer: PreTrainedTokenizerBase) -> ReplyFormat:
    """Find how the template writes a reply, by rendering short dialogues.

    The closing token is the first special token that the template writes after the reply. A
    template that writes none, and a tokenizer without a template, close a reply with ``eos_token``.

    Raises:
        ModelError: No token closes a reply, or the template writes the header of a reply but not
            where ``add_generation_prompt`` asks for it.
        DataError: The template refuses a question and its answer.
    """
    declared = tuple(tokenizer.init_kwargs.get(STOP_TOKENS) or ())
    special = tuple(tokenizer.all_special_tokens)
    state = (len(tokenizer), str(tokenizer.chat_template), special, tokenizer.eos_token)
    return _reply_format(tokenizer, state, declared)


@lru_cache(maxsize=CACHED_TOKENIZERS)
def _reply_format(
    tokenizer: PreTrainedTokenizerBase, state: tuple[object, ...], declared: tuple[str, ...]
) -> ReplyFormat:
    """Return the format.

    Args:
        state: What it depends on besides ``declared``.
        declared: The stop tokens that the tokenizer's files name.
    """
    header = ""
    lead = ""
    tail = ""
    after = ""
    closing = None
    strips = (False, False)
    if tokenizer.chat_template:
        asked = [Message("user", QUESTION)]
        prompt = render(tokenizer, asked, add_generation_prompt=True)
        before, after = _around_answer(tokenizer, [*asked, Message("assistant", ANSWER)])
        padded = _around_answer(tokenizer, [*asked, Message("assistant", f"\n{ANSWER}\n")])
        strips = (padded[0] == before, padded[1] == after)
        specials = [match.start() for match in special_tokens(tokenizer).literal.finditer(prompt)]
        asked_until = 0
        if QUESTION in prompt:
            asked_until = prompt.rfind(QUESTION) + len(QUESTION)
        header = prompt[max([asked_until, *specials[-1:]]) :]
        if not before.startswith(prompt):
            common = 0
            while prompt[common] == before[common : common + 1]:
                common += 1
            raise ModelError(
                f"the generation prompt of the chat template ends with {prompt[common:][:EXCERPT]!r}, but a reply does "
                "not begin so in its dialogues, and would be learned inside of what it opens; give the tokenizer a "
                "template whose generation prompt is how it begins a reply"
            )
        lead = before.removeprefix(prompt)
        tail, closing = _closing(tokenizer, after)
        if closing is None:
            tail, closing = _closing(tokenizer, _before_next_turn(tokenizer))
    if special_tokens(tokenizer).literal.search(lead):
        raise ModelError(
            f"the chat template begins a reply with {lead!r}, but not where add_generation_prompt asks for it; give "
            "the tokenizer a template that does"
        )
    if closing is None:
        tail = ""
        closing = tokenizer.eos_token
    if closing is None:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, and its chat template closes no "
            "turn; a reply could never end"
        )
    names = [closing]
    if tokenizer.eos_token:
        names.append(tokenizer.eos_token)
    names = list(dict.fromkeys([*names, *declared]))
    stop_ids = tuple(token_id(tokenizer, name) for name in names)
    header_ids = tuple(encode_escaped(tokenizer, header, {}))
    markers: tuple[str, ...] = ()
    unfit: frozenset[str] = frozenset()
    if tokenizer.chat_template:
        markers = _markers(str(tokenizer.get_chat_template()))
        unfit = _unfit_dialogues(tokenizer, lead)
    return ReplyFormat(
        header, header_ids, lead, tail, stop_ids[0], stop_ids, strips, after, markers, unfit
    )


def _markers(template: str) -> tuple[str, ...]:
    """Return the strings of a template, other than words, that it may look for in contents."""
    strings = {literal.replace("\\n", "\n").strip() for literal in string_literals(template)}
    return tuple(sorted(text for text in strings if len(text) > 2 and re.search(r"[^\w\s]", text)))


def _unfit_dialogues(tokenizer: PreTrainedTokenizerBase, lead: str) -> frozenset[str]:
    """Return the kinds of dialogues that the template does not continue as its prompt ends.

    Those that it refuses are left out. What precedes the last question may differ: Mistral's
    template writes the system turn beside the last one alone.
    """
    unfit = set()
    for name, messages in probe_dialogues().items():
        with suppress(DataError):
            if not _goes_on(tokenizer, messages, lead):
                unfit.add(name)
    if SEVERAL_TURNS in unfit:
        unfit.discard(REASONING_BEFORE)
    return frozenset(unfit)


def _goes_on(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], lead: str) -> bool:
    """Return whether a reply begins behind the last question as the generation prompt ends."""
    question = messages[-1].content
    prompt = render(tokenizer, messages, add_generation_prompt=True)
    answered = render(tokenizer, [*messages, Message("assistant", ANSWER)])
    before = answered.rpartition(ANSWER)[0]
    return prompt.rpartition(question)[2] + lead == before.rpartition(question)[2]


def probe_dialogues() -> dict[str, list[Message]]:
    """Return short prompts of the kinds that templates treat in ways of their own."""
    asked = Message("user", QUESTION)
    again = Message("user", NEXT_QUESTION)
    return {
        SYSTEM_TURN: [Message("system", "Be brief."), asked],
        SEVERAL_TURNS: [asked, Message("assistant", ANSWER), again],
        REASONING_BEFORE: [asked, Message("assistant", REASONED), again],
    }


def refused_dialogues(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return why the template cannot write some kinds of dialogues, by kind."""
    unfit = sorted(reply_format(tokenizer).unfit)
    refused = dict.fromkeys(unfit, "its generation prompt is not how it begins a reply")
    for name, messages in probe_dialogues().items():
        if name == REASONING_BEFORE:
            continue  # which templates leave out, as they should
        try:
            text = render(tokenizer, messages, add_generation_prompt=True)
        except DataError as error:
            refused[name] = str(error.__cause__).strip()
        else:
            if not all(message.content in text for message in messages):
                refused[name] = "it leaves it out"
    return refused


def bos_expression(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return how a template begins for a model whose texts all begin with the same token.

    It is empty for other models.
    """
    bos_id = tokenizer.bos_token_id
    if bos_id is None or tokenizer.encode("a")[:1] != [bos_id]:
        return ""
    return "{{ bos_token }}"


def _around_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[str, str]:
    """Return what the template writes before and after the probe's answer."""
    before, answer, after = render(tokenizer, messages).partition(ANSWER)
    if not answer:
        raise ModelError(
            "the chat template leaves an assistant's reply out; give the tokenizer another one"
        )
    return before, after


def _closing(tokenizer: PreTrainedTokenizerBase, after: str) -> tuple[str, str | None]:
    """Return the text up to the first added token in ``after``, and that token, if any."""
    names = set(tokenizer.all_special_tokens)
    names.update(token.content for token in tokenizer.added_tokens_decoder.values())
    occurring = [(after.find(name), -len(name), name) for name in names if name in after]
    if not occurring:
        return "", None
    position, _, name = min(occurring)
    return after[:position], name


def _before_next_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the template writes between an answer and the opening of the next turn.

    Some close a turn only there. Empty where the template takes one question at a time.
    """
    asked = Message("user", QUESTION)
    messages = [asked, Message("assistant", ANSWER), Message("user", NEXT_QUESTION)]
    try:
        after = render(tokenizer, messages).partition(ANSWER)[2]
    except DataError:
        return ""
    between = after.partition(NEXT_QUESTION)[0]
    opening = render(tokenizer, [asked]).partition(QUESTION)[0]
    # The opening of a user's turn is what both have at their end, from a special token on.
    for match in special_tokens(tokenizer).literal.finditer(between):
        if opening.endswith(between[match.start() :]):
            return between[: match.start()]
    return between
