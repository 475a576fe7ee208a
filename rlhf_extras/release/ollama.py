"""The Modelfile by which Ollama serves a model folder: template, stop tokens and sampling.

Ollama writes dialogues by templates of Go, which cannot be translated from Jinja. What a chat
template writes around the texts of a dialogue is found by rendering one, and written as a template
of Go that writes the same.
Source: https://docs.ollama.com/modelfile
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat_template import render, reply_format
from rlhf_core.data.schema import Message
from rlhf_core.errors import RlhfError

MODELFILE = "Modelfile"
# What Ollama calls the sampling settings that a policy is judged with.
PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "repetition_penalty": "repeat_penalty",
    "max_new_tokens": "num_predict",
}
SYSTEM = "SYSTEM TURN"
TURNS = ("FIRST QUESTION", "FIRST ANSWER", "SECOND QUESTION", "SECOND ANSWER", "THIRD QUESTION")
QUOTES = '"""'


def modelfile(tokenizer: PreTrainedTokenizerBase, sampling: Mapping[str, Any]) -> str:
    """Return the Modelfile of the model folder in which it will lie.

    It has no TEMPLATE where the chat template writes more than texts around turns, as some do for
    reasoning: Ollama then recognises the templates that it knows.

    Args:
        tokenizer: That of the folder.
        sampling: The settings that the policy was judged with.
    """
    lines = ["FROM ."]
    template = go_template(tokenizer)
    if template is None:
        lines.append("# The chat template cannot be written as a template of Go.")
    else:
        lines.append(f"TEMPLATE {QUOTES}{template}{QUOTES}")
    stops = tokenizer.convert_ids_to_tokens(list(reply_format(tokenizer).stop_ids))
    lines += [f"PARAMETER stop {QUOTES}{stop}{QUOTES}" for stop in stops]
    lines.append("PARAMETER top_k 0")
    for name, value in sampling.items():
        if name in PARAMETERS:
            lines.append(f"PARAMETER {PARAMETERS[name]} {value}")
    return "\n".join(lines) + "\n"


def go_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Write the chat template as one of Go, None where that is not possible.

    The token that all texts begin with is left out, since the runtime puts it there. A system turn
    is dropped where the chat template refuses one.
    """
    if not tokenizer.chat_template:
        return None
    plain = _around(tokenizer, TURNS)
    if plain is None:
        return None
    head, after_question, after_answer = plain
    opening = head
    with_system = _around(tokenizer, (SYSTEM, *TURNS))
    if with_system is not None:
        before, between, *rest = with_system
        if rest != [after_question, after_answer]:
            return None
        opening = "{{ if .System }}" + before + "{{ .System }}" + between
        opening += "{{ else }}" + head + "{{ end }}"
    pieces = [head, after_question, after_answer, *(with_system or ())]
    if any("{{" in piece or QUOTES in piece for piece in pieces):
        return None
    question = '{{ if eq .Role "user" }}{{ .Content }}' + after_question
    answer = '{{ else if eq .Role "assistant" }}{{ .Content }}' + after_answer
    return opening + "{{ range .Messages }}" + question + answer + "{{ end }}{{ end }}"


def _around(tokenizer: PreTrainedTokenizerBase, contents: Sequence[str]) -> list[str] | None:
    """Return what is written before the turns, after a question and after an answer.

    With a system turn, what is written behind it comes second. None where the template refuses the
    dialogue, leaves a turn out, or writes one turn otherwise than another.
    """
    roles = ["user", "assistant", "user", "assistant", "user"]
    if len(contents) > len(roles):
        roles = ["system", *roles]
    messages = [Message(role, text) for role, text in zip(roles, contents, strict=True)]
    try:
        text = render(tokenizer, messages, add_generation_prompt=True)
    except RlhfError:
        return None
    parts = re.split("|".join(map(re.escape, contents)), text)
    if len(parts) != len(contents) + 1:
        return None
    *opening, first, answered, second, answered_again, third = parts
    if not first == second == third or answered != answered_again:
        return None
    bos = tokenizer.bos_token
    if bos and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]:
        opening[0] = opening[0].removeprefix(bos)
    return [*opening, first, answered]
