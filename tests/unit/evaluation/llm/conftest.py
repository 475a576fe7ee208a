"""A real HTTP server on loopback that answers like an OpenAI-compatible endpoint, or fails as a script says."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

ENDLESS: dict[Any, bytes] = {"drip": b" ", "flood": b" " * (1 << 20)}
Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
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
    """``script`` answers the first requests in turn, then ``say`` does. An event holds a request until it is set;
    ``"cut"`` sends half of the answer and closes the connection, ``"drip"`` and ``"flood"`` send spaces without end, a
    few or many."""

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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.requests.append({"path": self.path} | body)
                state.headers.append(dict(self.headers))
                step = state.script.pop(0) if state.script else None
            if isinstance(step, threading.Event):
                step.wait()
            if isinstance(step, str) and step in ENDLESS:
                self.send_response(200)
                self.end_headers()
                while not step_out.wait(0.01 if step == "drip" else 0):
                    self.wfile.write(ENDLESS[step])
            status, content, *more = step if isinstance(step, tuple) else (200, state.usual_answer(body))
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if step == "cut" else data)
            self.close_connection = step == "cut"

        def log_message(self, *args: Any) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
                super().handle()

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    state.base_url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    step_out.set()
    http.shutdown()
    http.server_close()
    thread.join()
