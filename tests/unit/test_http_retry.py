"""Posting to servers that hold a request for ever, compress what was not asked for, or repeat the
token.
"""

from __future__ import annotations

import gzip
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlhf_extras.http_retry import LARGEST_ANSWER, RetriesExhausted, post_json

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
Serve = Callable[..., str]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that sends ``begin``, then ``part`` again and again; it returns its port or
    the socket's path.
    """
    over = threading.Event()
    opened: list[socket.socket] = []

    def answer(connection: socket.socket, begin: bytes, part: bytes) -> None:
        with connection:
            connection.recv(1 << 16)
            try:
                connection.sendall(begin)
                while part and not over.wait(0.02):
                    connection.sendall(part)
            except OSError:
                pass  # the client has gone

    def listen(listener: socket.socket, begin: bytes, part: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection, begin, part), daemon=True).start()

    def start(begin: bytes, part: bytes = b"", path: Path | None = None) -> str:
        listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        opened.append(listener)
        listener.bind(str(path) if path else ("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=listen, args=(listener, begin, part), daemon=True).start()
        return str(path) if path else str(listener.getsockname()[1])

    yield start
    over.set()
    for listener in opened:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def post(client: httpx.Client, url: str, **settings: Any) -> httpx.Response:
    with client:
        return post_json(
            client, url, {"a": 1}, wait=lambda seconds: None, **{"retries": 0} | settings
        )


SLOW = {
    "status line": (b"", b"H"),
    "header": (OK + b"X: ", b"a"),
    "header lines": (OK, b"X: a\r\n"),
    "interim answers": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "many interim answers": (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 1000),
    "body": (OK + b"Content-Length: 100000\r\n\r\n", b"a"),
    "body to the end of the connection": (OK + b"\r\n", b"a"),
    "chunk size": (CHUNKED, b"0"),
    "chunk extension": (CHUNKED + b"1;", b"x"),
    "trailer": (CHUNKED + b"2\r\n{}\r\n0\r\nX: ", b"a"),
}


@pytest.mark.parametrize(("begin", "part"), SLOW.values(), ids=SLOW)
def test_a_request_ends_in_time_whatever_part_of_the_answer_is_slow(
    serve: Serve, begin: bytes, part: bytes
) -> None:
    url = f"http://127.0.0.1:{serve(begin, part)}/"
    with pytest.raises(
        RetriesExhausted,
        match=r"failed 2 times, .*ReadTimeout: the answer was not whole after 0.4 s",
    ):
        post(httpx.Client(timeout=0.4), url, retries=1)


def test_a_slow_answer_on_a_unix_socket_ends_in_time(serve: Serve, tmp_path: Path) -> None:
    transport = httpx.HTTPTransport(uds=serve(OK + b"X: ", b"a", tmp_path / "s"))
    with pytest.raises(RetriesExhausted, match=r"not whole after 0\.4 s"):
        post(httpx.Client(timeout=0.4, transport=transport), "http://localhost/")


def test_a_slow_handshake_ends_in_time(serve: Serve) -> None:
    port = serve(b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc\x03\x03", b"a")
    with pytest.raises(RetriesExhausted, match="Timeout"):
        post(httpx.Client(timeout=0.4), f"https://127.0.0.1:{port}/")


def test_an_answer_in_time_stays_and_leaves_nothing_running(serve: Serve) -> None:
    port = serve(OK + b"Content-Encoding: Identity\r\nX: y\r\nContent-Length: 2\r\n\r\n{}")
    answer = post(httpx.Client(timeout=30), f"http://127.0.0.1:{port}/")
    assert (answer.json(), answer.headers["X"]) == ({}, "y")
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def deflated(size: int) -> bytes:
    return gzip.compress(bytes(size), 9)


COMPRESSED = {
    "gzip": (b"gzip", gzip.compress(b"{}"), b""),
    "deflate": (b"deflate", zlib.compress(b"{}"), b""),
    "br": (b"br", b"\x0b\x00\x80{}\x03", b""),
    "gzip twice": (b"gzip, gzip", gzip.compress(deflated(4 * LARGEST_ANSWER)), b""),
    "a name without end": (b"gzip", b"\x1f\x8b\x08\x08\0\0\0\0\0\xff", b"n" * 1000),
    "empty blocks": (b"deflate", b"", b"\0\0\0\xff\xff" * 100),
    "identity and gzip": (b"identity, gzip", gzip.compress(b"{}"), b""),
    "unknown": (b"rot13", b"{}", b""),
}


@pytest.mark.parametrize(("encoding", "begin", "part"), COMPRESSED.values(), ids=COMPRESSED)
def test_a_compressed_answer_is_never_unpacked(
    serve: Serve, encoding: bytes, begin: bytes, part: bytes
) -> None:
    port = serve(OK + b"Content-Encoding: " + encoding + b"\r\n\r\n" + begin, part)
    with pytest.raises(RetriesExhausted, match="the answer is compressed, which was not asked for"):
        post(httpx.Client(timeout=5), f"http://127.0.0.1:{port}/")


ECHOES = {
    "status line": b"HTTP/1.1 %s\r\n\r\n",
    "no status line": b"%s\r\n\r\n",
    "header line": OK + b"%s\r\n\r\n",
    "header line with quotes": OK + b"\"'%s\r\n\r\n",
    "length": OK + b"Content-Length: %s\r\n\r\n",
    "location": b"HTTP/1.1 302 Found\r\nLocation: http://a:%s/\r\n\r\n",
    "encoding": OK + b"Content-Encoding: %s\r\n\r\n",
}


@pytest.mark.parametrize("secret", ["s3cret-of-test", "s3cret\\of'test", 's3cret"of\\\\test'])
@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
def test_a_malformed_answer_does_not_repeat_the_token(
    serve: Serve, echo: bytes, secret: str
) -> None:
    port = serve(echo.replace(b"%s", secret.encode()))
    with pytest.raises(RetriesExhausted) as caught:
        post(httpx.Client(timeout=5), f"http://127.0.0.1:{port}/", secret=secret)
    assert "s3cret" not in str(caught.value)
