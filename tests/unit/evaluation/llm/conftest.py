"""A real HTTP server on loopback that answers like an OpenAI-compatible endpoint, or fails as a
script says.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_server import Answer, post_server

REPLIES = re.compile(r"<reply_a>\n(.*)\n</reply_a>.*<reply_b>\n(.*)\n</reply_b>", re.DOTALL)


def longer_is_better(reply_a: str, reply_b: str) -> str:
    """A model without position bias."""
    verdict = "tie" if len(reply_a) == len(reply_b) else "A" if len(reply_a) > len(reply_b) else "B"
    return json.dumps({"reason": f"{verdict} it is", "verdict": verdict})


def completion(text: Any, usage: dict[str, int] | None = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    counts = usage if usage is not None else {"prompt_tokens": 100, "completion_tokens": 10}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": counts}


@dataclass
class ChatServer:
    """``script`` answers the first requests in turn, then ``say`` does. An event holds a request
    until it is set; ``"cut"`` sends half of the answer and closes the connection, ``"drip"`` and
    ``"flood"`` send spaces without end, a few or many."""

    base_url: str = ""
    say: Callable[[str, str], str] = longer_is_better
    script: list[Answer | threading.Event | str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    usage: dict[str, int] | None = None

    def usual_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        match = REPLIES.search(body["messages"][0]["content"])
        assert match
        return completion(self.say(match[1], match[2]), self.usage)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    """A chat server on a free port of 127.0.0.1."""
    state = ChatServer()
    lock, step_out = threading.Lock(), threading.Event()

    def spaces(count: int, pause: float) -> Iterator[bytes]:
        while not step_out.wait(pause):
            yield b" " * count

    def answer(path: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        with lock:
            state.requests.append({"path": path} | body)
            state.headers.append(headers)
            step = state.script.pop(0) if state.script else None
        if isinstance(step, threading.Event):
            step.wait()
        if isinstance(step, tuple):
            return step
        if step in ("drip", "flood"):
            return 200, spaces(1, 0.01) if step == "drip" else spaces(1 << 20, 0)
        whole = json.dumps(state.usual_answer(body))
        return (
            (200, whole[: len(whole) // 2], {"Content-Length": str(len(whole))})
            if step == "cut"
            else (200, whole)
        )

    with post_server(answer) as address:
        state.base_url = f"{address}/v1"
        yield state
        step_out.set()
