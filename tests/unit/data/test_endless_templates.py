"""A chat template that does not end for one dialogue alone, which no probe finds when the model is opened."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from unit.data.test_chat import TEMPLATE, word_tokenizer

from rlhf_core.data import chat_template
from rlhf_core.data.encoding import encode_columns, encode_prompt, encode_reply
from rlhf_core.data.schema import Message
from rlhf_core.errors import ModelError
from rlhf_core.runtime import limited_call
from rlhf_core.runtime.limited_call import TookTooLong, limited_time

LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
KINDS = {
    "a loop": (LOOP, "takes more than 0.5 s"),
    "a loop that catches nothing": ("{% macro f() %}" + LOOP + "{% endmacro %}{{ f() | length }}", "takes more than"),
    "a text": ("{{ messages[-1]['role'] * 10**7 }}", "writes 40000"),
    "pieces": ("{% for a in range(99999) %}{{ 'abcdefghijklmnopqrstuvwxyz' }}{% endfor %}", "writes 2599"),
}


def only_on(word: str, then: str) -> str:
    return f"{{% if '{word}' in messages[-1]['content'] %}}{then}{{% endif %}}{TEMPLATE}"


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_prompt(word_tokenizer(), [Message("user", "hello")])  # imports take longer
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_template_that_does_not_end_for_one_dialogue_is_one_line(kind: str, in_thread: bool) -> None:
    then, message = KINDS[kind]
    tokenizer = word_tokenizer()
    tokenizer.chat_template = only_on("red", then)
    prompts = [[Message("user", "hello")], [Message("user", "red")]]

    def encode() -> None:
        for call in (
            lambda: encode_prompt(tokenizer, prompts[1]),
            lambda: encode_columns(tokenizer, {"prompt": prompts}),
        ):
            with pytest.raises(ModelError, match=rf"^the chat template {message}[^\n]*'red'[^\n]*take another model$"):
                call()

    assert encode_prompt(tokenizer, prompts[0])  # what opening a folder sees
    if in_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(encode).result()
    else:
        encode()
    assert encode_prompt(tokenizer, prompts[0]) and encode_reply(tokenizer, "hello there")


def test_a_long_dialogue_is_written_whole() -> None:
    content = "hello " * 300_000
    assert len(chat_template.render(word_tokenizer(), [Message("user", content)])) > len(content)


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_time_in_which_a_thread_waits_does_not_count() -> None:
    with limited_time(0.3):
        time.sleep(1.5)
    with limited_time(0.3):
        burn(0.1)
    with pytest.raises(TookTooLong), limited_time(0.1):
        burn(60)


def test_the_end_of_one_thread_is_not_that_of_another() -> None:
    ended: list[str] = []

    def work(name: str, seconds: float) -> None:
        try:
            with limited_time(0.2):
                burn(seconds)
            burn(0.5)  # what follows is not limited
            ended.append(name)
        except TookTooLong:
            ended.append(f"{name} too long")

    threads = [threading.Thread(target=work, args=given) for given in (("short", 0.01), ("long", 60.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["long too long", "short"] and not limited_call._limited


def test_a_fork_has_limits_of_its_own() -> None:
    with limited_time(5.0):
        pass  # the watch of this process runs
    child = os.fork()
    if child == 0:
        try:
            with limited_time(0.1):
                burn(30)
            os._exit(1)
        except TookTooLong:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
