"""The Modelfile of a model folder: its template of Go writes what the chat template does."""

from __future__ import annotations

import re

import pytest
from real_templates import CHATML, REAL_TEMPLATES, RealTemplate, small_tokenizer

from rlhf_core.data.chat_template import render
from rlhf_core.data.schema import Message
from rlhf_extras.release.ollama import go_template, modelfile

ASKED = [Message("user", "Why is the sky blue?")]
GOES_ON = [*ASKED, Message("assistant", "Light."), Message("user", "No, tell me")]
BRIEF = Message("system", "Be brief.")
DIALOGUES = [ASKED, GOES_ON, [BRIEF, *ASKED], [BRIEF, *GOES_ON]]
# What go_template writes, and nothing else of Go's language.
WRITTEN = re.compile(
    r"(?:{{ if \.System }}(?P<before>.*){{ \.System }}(?P<between>.*?){{ else }}(?P<head>.*){{ end }}|(?P<only>.*))"
    r'{{ range \.Messages }}{{ if eq \.Role "user" }}{{ \.Content }}(?P<question>.*)'
    r'{{ else if eq \.Role "assistant" }}{{ \.Content }}(?P<answer>.*){{ end }}{{ end }}',
    re.DOTALL,
)
SYSTEM_BESIDE_THE_LAST_TURN = "mistral-0.3"


def executed(template: str, messages: list[Message]) -> str:
    """What Ollama makes of such a template: ``.System`` is the text of the system turn."""
    found = WRITTEN.fullmatch(template)
    assert found is not None, template
    part = found.groupdict()
    text = part["head"] if part["only"] is None else part["only"]
    for message in messages:
        if message.role == "system":
            assert part["before"] is not None
            text = part["before"] + message.content + part["between"]
        else:
            text += message.content
            text += part["question"] if message.role == "user" else part["answer"]
    return text


@pytest.mark.parametrize("real", REAL_TEMPLATES, ids=lambda real: real.name)
def test_ollama_writes_dialogues_as_the_chat_template_does(real: RealTemplate) -> None:
    tokenizer = small_tokenizer(real)
    template = go_template(tokenizer)
    if real.name == SYSTEM_BESIDE_THE_LAST_TURN:
        assert template is None
        return
    assert template is not None
    dialogues = DIALOGUES if real.system else DIALOGUES[:2]
    for messages in dialogues:
        expected = render(tokenizer, messages, add_generation_prompt=True)
        assert (real.bos or "") + executed(template, messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role + ': ' + m.content + '{{' }}{% endfor %}{{ 'assistant: ' }}",
        "{% for m in messages %}{{ m.role + loop.index|string + m.content }}{% endfor %}{{ 'assistant' }}",
        "{{ messages[-1].content + '<|im_end|>' }}",
    ],
    ids=["braces", "turns are counted", "one turn alone"],
)
def test_what_go_cannot_write_is_left_out(template: str) -> None:
    other = RealTemplate("other", template, CHATML, "<|im_end|>", "<|im_end|>")
    assert go_template(small_tokenizer(other)) is None


def test_stop_tokens_and_sampling_are_named() -> None:
    real = next(each for each in REAL_TEMPLATES if each.name == "llama-3")
    sampling = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 64}
    first, template, *parameters = re.split(
        r"\n(?=TEMPLATE|PARAMETER)", modelfile(small_tokenizer(real), sampling)
    )
    assert first == "FROM ." and template.startswith('TEMPLATE """')
    assert "\n".join(parameters).splitlines() == [
        'PARAMETER stop """<|eot_id|>"""',
        'PARAMETER stop """<|end_of_text|>"""',
        "PARAMETER top_k 0",
        "PARAMETER temperature 0.7",
        "PARAMETER top_p 0.9",
        "PARAMETER repeat_penalty 1.1",
        "PARAMETER num_predict 64",
    ]
