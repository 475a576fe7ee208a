"""Special tokens in text: a chat template's own are control tokens, those written out in a turn are ordinary text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import UnwritableText

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
    """The id of one token; that of the unknown token if the vocabulary lacks it."""
    index = tokenizer.convert_tokens_to_ids(token)
    return index if isinstance(index, int) else index[0]


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """All added tokens that are marked special, and those that have a role such as ``eos_token``."""
    return _special_tokens(tokenizer, (len(tokenizer), *tokenizer.all_special_tokens))


@lru_cache(maxsize=CACHED_TOKENIZERS)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, state: tuple[object, ...]) -> SpecialTokens:
    """``state`` is what changes with the tokenizer's special tokens."""
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = sorted({*added, *tokenizer.all_special_tokens}, key=lambda name: (-len(name), name))

    def with_whitespace(name: str) -> str:
        left, right = (name in added and added[name].lstrip), (name in added and added[name].rstrip)
        return (r"\s*" if left else "") + re.escape(name) + (r"\s*" if right else "")

    return SpecialTokens(
        ids={name: token_id(tokenizer, name) for name in names},
        literal=re.compile("|".join(map(re.escape, names)) or "(?!)"),
        pattern=re.compile("|".join(map(with_whitespace, names)) or "(?!)"),
    )


def escape(tokenizer: PreTrainedTokenizerBase, contents: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Replace special tokens that are written out in ``contents`` by characters that no content has.

    Returns:
        The contents, and the token that each of the characters stands for: none in ordinary texts.
    """
    literal = special_tokens(tokenizer).literal
    written = sorted({token for content in contents for token in literal.findall(content)})
    if not written:
        return list(contents), {}
    occurring = set("".join(contents))
    unused = (chr(code) for code in PLACEHOLDERS if chr(code) not in occurring)
    placeholders = dict(zip(written, unused, strict=False))
    escaped = [literal.sub(lambda match: placeholders[match.group()], content) for content in contents]
    return escaped, {placeholder: token for token, placeholder in placeholders.items()}


def encode_escaped(tokenizer: PreTrainedTokenizerBase, text: str, placeholders: Mapping[str, str]) -> list[int]:
    """Token ids of a text whose special tokens are control tokens, and whose ``placeholders`` are ordinary text.

    No token is added at the beginning or the end.

    Raises:
        UnwritableText: The tokenizer cannot write the text of a special token as ordinary text.
    """
    if not placeholders:
        return list(tokenizer.encode(text, add_special_tokens=False))
    special = special_tokens(tokenizer)
    ids: list[int] = []
    start = 0
    for match in special.pattern.finditer(text):
        ids += _encode_plain(tokenizer, text[start : match.start()], placeholders)
        ids.append(special.ids[special.literal.findall(match.group())[0]])
        start = match.end()
    return ids + _encode_plain(tokenizer, text[start:], placeholders)


def _encode_plain(tokenizer: PreTrainedTokenizerBase, text: str, placeholders: Mapping[str, str]) -> list[int]:
    """Token ids of text between two control tokens, none of which is a special token."""
    for placeholder, token in placeholders.items():
        text = text.replace(placeholder, token)
    ids = list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)) if text else []
    control = set(ids) & (set(special_tokens(tokenizer).ids.values()) - {tokenizer.unk_token_id})
    if control:
        written = str(tokenizer.convert_ids_to_tokens(min(control)))
        reason = f"a text contains {written!r}, which this tokenizer cannot write but as a control token"
        raise UnwritableText(f"{reason}: take it out of the data ({text[:40]!r}…)", reason)
    return ids
