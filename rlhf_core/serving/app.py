"""The HTTP interface: chat completions, models, health and metrics."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rlhf_core.serving.completions import Completions
from rlhf_core.serving.limits import MAX_BODY_BYTES
from rlhf_core.serving.metrics import CONTENT_TYPE
from rlhf_core.serving.protocol.access import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    internal_error,
    require_access,
    require_loopback_name,
)
from rlhf_core.serving.protocol.chat import ECHOED_CHARACTERS, model_entry, model_list, parse_chat_request, shown

JSON = "application/json"
# Proxies would otherwise keep pieces back until a buffer is full.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AppSettings:
    """How an app behaves around its requests.

    Attributes:
        token: The bearer token that clients must send, None for none.
        watch_seconds: How often the source is asked which revision to serve, None for never.
    """

    token: str | None = None
    watch_seconds: float | None = None


def create_app(completions: Completions, settings: AppSettings) -> FastAPI:
    """The application. Its life ends when the last reply has ended."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        stop = threading.Event()
        if settings.watch_seconds is not None:
            arguments = (stop, settings.watch_seconds)
            threading.Thread(target=completions.watch.run, args=arguments, name="watch", daemon=True).start()
        try:
            yield
        finally:
            stop.set()
            await asyncio.to_thread(completions.close)

    # Pages of API documentation would load scripts from another host.
    app = FastAPI(title="rlhf serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app, completions)
    _add_chat(app, completions, settings.token)
    _add_operations(app, completions, settings.token)
    return app


def _add_chat(app: FastAPI, completions: Completions, token: str | None) -> None:
    """Add ``/v1/chat/completions`` and ``/v1/models``."""
    metrics = completions.metrics
    created = int(time.time())
    parser = ThreadPoolExecutor(1, thread_name_prefix="parsing")  # one at a time: parsing takes room, and gives no turn

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        _require_access(request, token)
        body = await _read_body(request, completions.limits.timeout_seconds)
        chat = await asyncio.get_running_loop().run_in_executor(parser, parse_chat_request, body)
        del body
        reply = await completions.begin(chat)
        if chat.stream:
            metrics.requests.labels(200).inc()
            return StreamingResponse(reply.events(), media_type="text/event-stream", headers=STREAM_HEADERS)

        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        answer = await reply.whole(disconnected)
        metrics.requests.labels(200).inc()
        return JSONResponse(answer)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _require_access(request, token)
        metrics.requests.labels(200).inc()
        return model_list(completions.watch.policy.revision.names, created)

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        _require_access(request, token)
        names = completions.watch.policy.revision.names
        if name not in names:
            raise ApiError(
                404, f"there is no model {shown(name)}; there is {' and '.join(names)}", code="model_not_found"
            )
        metrics.requests.labels(200).inc()
        return model_entry(name, created)


def _add_operations(app: FastAPI, completions: Completions, token: str | None) -> None:
    """Add ``/healthz``, which needs no token, and ``/metrics``."""

    @app.get("/healthz")
    async def healthz(request: Request) -> dict[str, Any]:
        if token is None:
            require_loopback_name(request.headers.get("host"))
        watch = completions.watch
        return {
            "status": "degraded" if watch.problem else "ok",
            "model": watch.policy.revision.id,
            "in_flight": completions.in_flight,
            # That something failed, and not what: whoever asks has shown no token.
            "problem": f"{watch.trouble}; the log of the server says why" if watch.problem else None,
        }

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        _require_access(request, token)
        return Response(completions.metrics.exposition(), media_type=CONTENT_TYPE)


def _add_error_handlers(app: FastAPI, completions: Completions) -> None:
    """Report every error as OpenAI's API does, and count it."""

    def response(error: ApiError) -> Response:
        completions.metrics.requests.labels(error.status).inc()
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method[:ECHOED_CHARACTERS]} {request.url.path[:ECHOED_CHARACTERS]}: {error.detail}"
        return response(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def unexpected_error(_: Request, __: Exception) -> Response:
        return response(internal_error())  # the server logs the traceback


def _require_access(request: Request, token: str | None) -> None:
    require_access(token, request.headers.get("authorization"), request.headers.get("host"))


async def _read_body(request: Request, seconds: float) -> bytes:
    """The body of a request.

    Raises:
        ApiError: It is no JSON by its header, too large, does not arrive within ``seconds``, or the client leaves.
    """
    # A page of another site may send other types without asking first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, f"send JSON with the header Content-Type: {JSON}")
    too_long = ApiError(413, f"the request has more than {MAX_BODY_BYTES} bytes; shorten the messages")
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise too_long
    except TimeoutError as error:
        raise ApiError(408, f"the request did not arrive within {seconds:g} seconds", code="timeout") from error
    except ClientDisconnect as error:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client has closed the connection") from error
    return bytes(body)
