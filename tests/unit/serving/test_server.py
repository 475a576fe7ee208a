"""Connections that say nothing take no place for long, and none from those that ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from rlhf_extras.serving import server
from rlhf_extras.serving.server import OncePerMinute, connection_limit, limited_protocol

ENDLESS = b"GET /endless HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def without_end(ended: asyncio.Event) -> AsyncIterator[bytes]:
    try:
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0)
    finally:
        ended.set()


@asynccontextmanager
async def listening(most: int, ended: asyncio.Event | None = None) -> AsyncIterator[int]:
    app = FastAPI()

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        return StreamingResponse(without_end(ended or asyncio.Event()))

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    config = uvicorn.Config(
        app, http=limited_protocol(most), port=0, log_config=None, lifespan="off"
    )
    running = uvicorn.Server(config)
    config.load()
    running.lifespan = config.lifespan_class(config)
    await running.startup()
    try:
        yield running.servers[0].sockets[0].getsockname()[1]
    finally:
        await running.shutdown()


async def asks(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    answer = await asyncio.wait_for(reader.readuntil(b"}"), 30)
    writer.close()
    return answer


def test_silent_connections_give_way_to_those_that_ask() -> None:
    async def story() -> None:
        async with listening(most=3) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
            for _ in range(5):
                assert b"200 OK" in await asks(port)
            ended = [reader for reader, _ in silent[:9]]
            for reader in ended:
                with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                    await asyncio.wait_for(reader.readexactly(1), 30)
            for _, writer in silent:
                writer.close()

    asyncio.run(story())


@pytest.mark.parametrize("begins", [b"", b"GET /healthz HTTP/1.1\r\nX: ", REQUEST + b"GET /"])
def test_a_head_that_does_not_come_ends_its_connection(
    begins: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)

    async def story() -> None:
        async with listening(most=8) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begins)
            await asyncio.wait_for(reader.read(), 30)  # to its end
            writer.close()

    asyncio.run(story())


@pytest.mark.parametrize("read", [0, 8 << 20])
def test_a_client_that_does_not_read_its_response_takes_no_place(
    read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.5)

    async def story() -> None:
        ended = asyncio.Event()
        async with listening(most=2, ended=ended) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(ENDLESS)
            if read:
                await asyncio.wait_for(reader.readexactly(read), 30)
            await asyncio.wait_for(ended.wait(), 30)
            for _ in range(3):
                assert b"200 OK" in await asks(port)
            writer.close()

    asyncio.run(story())


def test_a_message_is_logged_once_a_minute() -> None:
    once = OncePerMinute()
    texts = [
        "socket.accept() out of system resource",
        "socket.accept() out of system resource",
        "another",
    ]
    records = [
        logging.LogRecord("asyncio", logging.ERROR, "f", 1, text, (), None) for text in texts
    ]
    assert [once.filter(record) for record in records] == [True, False, True]
    failure = (ValueError, ValueError(), None)
    for cause, passes in ((None, [True, False]), (failure, [True, True])):
        text = f"with {cause}"
        repeated = [
            logging.LogRecord("uvicorn.error", logging.ERROR, "f", 1, text, (), cause)
            for _ in passes
        ]
        assert [once.filter(record) for record in repeated] == passes
    assert connection_limit() >= 2
