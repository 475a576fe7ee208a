"""The HTTP interface: chat completions, models, health and metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rlhf_core.serving.protocol import ECHOED_CHARACTERS, ApiError, parse_chat_request, shown
from rlhf_extras.serving.access import require_access, require_loopback_name
from rlhf_extras.serving.completions import CLIENT_CLOSED_REQUEST, Completions, internal_error
from rlhf_extras.serving.metrics import ServingMetrics

JSON = "application/json"
# Room for a prompt of 100,000 tokens and more. Larger bodies are not read.
MAX_BODY_BYTES = 4 * 2**20
# Proxies would otherwise keep pieces back until a buffer is full.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(
    completions: Completions, token: str | None = None, watch_seconds: float | None = None
) -> FastAPI:
    """The application. Its life ends when the last reply has ended.

    Args:
        token: The bearer token that clients must send, None for none.
        watch_seconds: How often the source is asked which revision to serve, None for never.
    """
    watch, metrics = completions.watch, completions.metrics
    created = int(time.time())
    # One at a time: parsing needs memory and blocks other threads.
    parser = ThreadPoolExecutor(1, thread_name_prefix="parsing")
    lifespan = _lifespan(completions, watch_seconds)
    # Pages of API documentation would load scripts from another host.
    app = FastAPI(
        title="rlhf serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )

    def admit(request: Request) -> None:
        require_access(token, request.headers.get("authorization"), request.headers.get("host"))

    def answered(content: Any) -> Response:
        metrics.requests.labels(200).inc()
        return content if isinstance(content, Response) else JSONResponse(content)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        admit(request)
        body = await _read_body(request, completions.limits.timeout_seconds)
        chat = await asyncio.get_running_loop().run_in_executor(parser, parse_chat_request, body)
        del body
        reply = await completions.begin(chat)
        if chat.stream:
            return answered(
                StreamingResponse(
                    reply.events(), media_type="text/event-stream", headers=STREAM_HEADERS
                )
            )

        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        return answered(await reply.whole(disconnected))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        admit(request)
        names = watch.policy.revision.names
        return answered({"object": "list", "data": [model_entry(name, created) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        admit(request)
        names = watch.policy.revision.names
        if name not in names:
            message = f"there is no model {shown(name)}; there is {' and '.join(names)}"
            raise ApiError(404, message, code="model_not_found")
        return answered(model_entry(name, created))

    @app.get("/healthz")
    async def healthz(request: Request) -> dict[str, Any]:
        if token is None:
            require_loopback_name(request.headers.get("host"))
        return _health(completions)

    @app.get("/metrics")
    async def exposition(request: Request) -> Response:
        admit(request)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    _answer_errors(app, metrics)
    return app


def _lifespan(
    completions: Completions, watch_seconds: float | None
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return what begins with the application, a thread that watches, and ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        stop = threading.Event()
        if watch_seconds is not None:
            asked = stop, watch_seconds
            watch = completions.watch.run
            threading.Thread(target=watch, args=asked, name="watch", daemon=True).start()
        try:
            yield
        finally:
            stop.set()
            await asyncio.to_thread(completions.close)

    return lifespan


def model_entry(name: str, created: int) -> dict[str, Any]:
    """One model of the list."""
    return {"id": name, "object": "model", "created": created, "owned_by": "rlhf-pipeline"}


def _health(completions: Completions) -> dict[str, Any]:
    watch = completions.watch
    # That something failed, and not what: whoever asks has shown no token.
    problem = f"{watch.trouble}; the log of the server says why" if watch.problem else None
    return {
        "status": "degraded" if watch.problem else "ok",
        "model": watch.policy.revision.id,
        "in_flight": completions.in_flight,
        "problem": problem,
    }


def _answer_errors(app: FastAPI, metrics: ServingMetrics) -> None:
    """Have every error answered in the form of the API, and counted."""

    def refused(error: ApiError) -> Response:
        metrics.requests.labels(error.status).inc()
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return refused(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method[:ECHOED_CHARACTERS]} {request.url.path[:ECHOED_CHARACTERS]}: {error.detail}"
        return refused(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def unexpected_error(_: Request, __: Exception) -> Response:
        return refused(internal_error())  # the server logs the traceback


async def _read_body(request: Request, seconds: float) -> bytes:
    """The body of a request.

    Raises:
        ApiError: It is no JSON by its header, too large, does not arrive within ``seconds``, or the
            client leaves.
    """
    # A page of another site may send other types without asking first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, f"send JSON with the header Content-Type: {JSON}")
    too_long = ApiError(
        413, f"the request has more than {MAX_BODY_BYTES} bytes; shorten the messages"
    )
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
        raise ApiError(
            408, f"the request did not arrive within {seconds:g} seconds", code="timeout"
        ) from error
    except ClientDisconnect as error:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client has closed the connection") from error
    return bytes(body)
