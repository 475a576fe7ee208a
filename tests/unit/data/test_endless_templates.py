"""A chat template that does not end for one dialogue alone, which no probe finds when the model is
opened.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from jinja2 import TemplateError
from real_templates import REAL_TEMPLATES
from unit.data.test_chat import TEMPLATE, word_tokenizer

from rlhf_core.data import chat_template, template_process
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import encode_columns, encode_prompt, encode_reply
from rlhf_core.errors import ModelError
from rlhf_core.runtime.limited_call import GIB

LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}"
SHARED = (
    "{% set n = namespace(x=['a']) %}{% for a in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
SLOW, LARGE = "takes more than 1 s", r"takes more than 0\.25 GiB of memory"
KINDS = {
    "a loop": (LOOP, SLOW),
    "a loop that catches nothing": (
        "{% macro f() %}" + LOOP + "{% endmacro %}{{ f() | length }}",
        SLOW,
    ),
    "a text": ("{{ messages[-1]['role'] * 10**7 }}", "writes 40000"),
    "pieces": (
        "{% for a in range(99999) %}{{ 'abcdefghijklmnopqrstuvwxyz' }}{% endfor %}",
        "writes 2599",
    ),
    # In C, between two steps of Python:
    "a power": ("{% set n = 9 %}{{ n ** (n ** n) }}", SLOW),
    "a product": ("{{ 'a' * 10**10 }}", LARGE),
    "a width of a filter": ("{{ '%1000000000d' | format(7) }}", LARGE),
    "a text doubled": (DOUBLED + "{{ n.x | length }}", LARGE),
    "a list that is written": (SHARED + "{{ n.x | string | length }}", f"({SLOW}|{LARGE})"),
    "a search": ("{{ ('a' * 10**6).replace('', 'b' * 10**6) | length }}", LARGE),
}


def only_on(word: str, then: str) -> str:
    return f"{{% if '{word}' in messages[-1]['content'] %}}{then}{{% endif %}}{TEMPLATE}"


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "SECONDS", 1)
    monkeypatch.setattr(template_process, "MEMORY", GIB // 4)


# Two seconds of a processor each; the loop holds the usual case.
KEPT_BUSY = {kind for kind, (_, message) in KINDS.items() if SLOW in message} - {"a loop"}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if kind in KEPT_BUSY else kind for kind in KINDS],
)
def test_a_template_that_does_not_end_for_one_dialogue_is_one_line(kind: str, brief: None) -> None:
    then, message = KINDS[kind]
    tokenizer = word_tokenizer()
    tokenizer.chat_template = only_on("red", then)
    prompts = [[Message("user", "hello")], [Message("user", "red")]]
    assert encode_prompt(tokenizer, prompts[0])  # what opening a folder sees
    with pytest.raises(
        ModelError, match=rf"^the chat template {message}[^\n]*'red'[^\n]*take another model$"
    ):
        encode_prompt(tokenizer, prompts[1])
    assert encode_prompt(tokenizer, prompts[0]) and encode_reply(tokenizer, "hello there")


def test_columns_and_threads_are_written_under_limits(brief: None) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = only_on("red", KINDS["a product"][0])

    def encode(word: str) -> bool:
        try:
            return bool(encode_columns(tokenizer, {"prompt": [[Message("user", word)]]}))
        except ModelError:
            return False

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encode, ["hello", "red", "hello", "hello"])) == [
            True,
            False,
            True,
            True,
        ]


def test_what_lm_eval_asks_is_written_under_limits(brief: None) -> None:
    tokenizer = word_tokenizer()
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    for arguments in ({"add_generation_prompt": True}, {"continue_final_message": True}):
        expected = tokenizer.apply_chat_template(turns, tokenize=False, **arguments)
        assert chat_template.render_turns(tokenizer, turns, **arguments) == expected
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(TemplateError, match="no system"):  # whereupon lm-eval leaves it out
        chat_template.render_turns(tokenizer, turns)


def test_a_long_dialogue_is_written_whole() -> None:
    content = "hello " * 300_000
    assert len(chat_template.render(word_tokenizer(), [Message("user", content)])) > len(content)


@pytest.mark.parametrize("real", REAL_TEMPLATES, ids=lambda real: real.name)
def test_the_process_writes_what_the_library_does(real: chat_template.Any) -> None:
    messages = [
        Message("user", "a\ud83d 天空\n\x00"),
        Message("assistant", "b"),
        Message("user", "c"),
    ]
    expected = real.tokenizer.apply_chat_template(
        [*map(vars, messages)], tokenize=False, add_generation_prompt=True
    )
    assert chat_template.render(real.tokenizer, messages, add_generation_prompt=True) == expected


def test_a_process_that_ended_is_started_anew_and_a_fork_has_its_own() -> None:
    tokenizer, messages = word_tokenizer(), [Message("user", "hello")]
    written = chat_template.render(tokenizer, messages)
    process = template_process.templates._process
    assert process is not None
    child = os.fork()
    if child == 0:
        os._exit(7 if chat_template.render(tokenizer, messages) == written else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert chat_template.render(tokenizer, messages) == written
    assert template_process.templates._process is process
    process.kill()
    process.wait()
    assert chat_template.render(tokenizer, messages) == written
    assert (
        len(
            [
                child
                for child in psutil.Process().children()
                if template_process.__name__ in child.cmdline()
            ]
        )
        == 1
    )
