"""Chat requests answered by threads that sample, while the event loop waits for them or passes
pieces on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlhf_core.sampling.reply import SampledReply
from rlhf_core.serving.accepted import AcceptedRequest, accept_request
from rlhf_core.serving.protocol import ApiError, ChatRequest, ServingLimits, shown
from rlhf_extras.serving.metrics import ServingMetrics
from rlhf_extras.serving.watch import PolicyWatch

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # the status that nginx gives it
RETRY_AFTER_SECONDS = 1  # what a refused client waits before it asks again
END_OF_STREAM = b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def internal_error() -> ApiError:
    """The error of a request that failed for a reason that only the server's log tells."""
    return ApiError(
        500,
        "the server failed on this request; its log says why",
        code="internal",
        kind="server_error",
    )


class ReplyTimedOut(Exception):
    """Ends the sampling of a reply that took too long."""


class ReplyCancelled(Exception):
    """Ends the sampling of a reply that nobody waits for."""


class Completions:
    """Answers chat requests by the served policy, within limits.

    Args:
        clock: Seconds that never go back.
        now: Seconds since 1970.
    """

    def __init__(
        self,
        watch: PolicyWatch,
        limits: ServingLimits,
        metrics: ServingMetrics,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.watch, self.limits, self.metrics = watch, limits, metrics
        self.clock, self._now = clock, now
        self._threads = ThreadPoolExecutor(limits.max_concurrent, thread_name_prefix="sampling")
        self.in_flight = 0

    def close(self) -> None:
        """Wait until every reply has ended."""
        self._threads.shutdown(wait=True)

    async def begin(self, request: ChatRequest) -> ReplyInProgress:
        """Accept a request and let a thread sample its reply.

        Raises:
            ApiError: The model is unknown, all threads are busy, or the prompt does not fit.
        """
        started = self.clock()
        policy = self.watch.policy
        names = policy.revision.names
        if request.model is not None and request.model not in names:
            message = f"there is no model {shown(request.model)}; ask for {' or '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if self.in_flight >= self.limits.max_concurrent:
            message = f"{self.in_flight} replies are being written, which is the most at a time; try again soon"
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            raise ApiError(
                429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=headers
            )
        self._count_in_flight(1)
        loop = asyncio.get_running_loop()
        created = int(self._now())
        accepting = loop.run_in_executor(
            self._threads, accept_request, request, policy, self.limits, created
        )
        try:
            accepted = await asyncio.shield(accepting)
        except asyncio.CancelledError:
            accepting.add_done_callback(self._release)
            raise
        except BaseException as error:
            self._count_in_flight(-1)
            if isinstance(error, Exception):
                raise
            logger.exception(
                "encoding a request failed"
            )  # a panic of the tokenizer, whose library is in Rust
            raise internal_error() from error
        reply = ReplyInProgress(self, accepted, started, self._threads)
        reply.sampled.add_done_callback(self._release)
        return reply

    def _count_in_flight(self, change: int) -> None:
        self.in_flight += change
        self.metrics.in_flight.set(self.in_flight)

    def _release(self, ended: asyncio.Future[Any]) -> None:
        if not ended.cancelled():
            ended.exception()  # otherwise asyncio logs an error that nobody waited for
        self._count_in_flight(-1)


class ReplyInProgress:
    """A reply that one of ``threads`` samples, and the event loop's end of it."""

    def __init__(
        self,
        completions: Completions,
        accepted: AcceptedRequest,
        started: float,
        threads: ThreadPoolExecutor,
    ) -> None:
        self.completions, self.accepted, self.started = completions, accepted, started
        self._cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()  # None: the reply has ended
        self._pieces = accepted.policy.pieces(accepted.settings.stop)
        self._first = True
        self.sampled: asyncio.Future[SampledReply] = self._loop.run_in_executor(
            threads, self._sample
        )
        self.sampled.add_done_callback(lambda _: self._queue.put_nowait(None))

    def _sample(self) -> SampledReply:
        """Sample the reply and record how it ended. This runs in a thread of its own."""
        metrics, accepted = self.completions.metrics, self.accepted
        end = "error"
        try:
            on_text = self._send_piece if accepted.request.stream else None
            reply = accepted.policy.reply(
                accepted.prompt_ids, accepted.settings, on_text, self._check
            )
            end = reply.finish_reason
        except ReplyTimedOut:
            end = "timeout"
            raise
        except ReplyCancelled:
            end = "cancelled"
            raise
        finally:
            metrics.replies.labels(end).inc()
        metrics.reply_seconds.observe(self.completions.clock() - self.started)
        metrics.prompt_tokens.observe(len(accepted.prompt_ids))
        metrics.completion_tokens.observe(len(reply.token_ids))
        return reply

    def _check(self) -> None:
        """End the sampling where nobody waits for the reply any more, or it has taken too long."""
        elapsed = self.completions.clock() - self.started
        if self._first:
            self.completions.metrics.first_token_seconds.observe(elapsed)
            self._first = False
        if self._cancelled.is_set():
            raise ReplyCancelled
        if elapsed > self.completions.limits.timeout_seconds:
            raise ReplyTimedOut

    def _send_piece(self, text: str) -> None:
        """Pass the next piece of the reply to the event loop."""
        if piece := self._pieces.next(text):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    async def whole(self, disconnected: Callable[[], Awaitable[None]]) -> dict[str, Any]:
        """Wait for the reply and return the response; if the client leaves first, the reply is
        cancelled.

        Raises:
            ApiError: It took too long, the client has left, or sampling failed.
        """
        leaving = asyncio.ensure_future(disconnected())
        try:
            awaited: set[asyncio.Future[Any]] = {self.sampled, leaving}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not self.sampled.done():
                raise ApiError(CLIENT_CLOSED_REQUEST, "the client has closed the connection")
            reply = self._result()
        finally:
            leaving.cancel()
            self._cancelled.set()
        return self.accepted.response(reply)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; if the client leaves, the reply is cancelled.

        An error after the first event is an event of its own, and the last.
        """

        def chunk(delta: Mapping[str, str], finish_reason: str | None = None) -> dict[str, Any]:
            completion = self.accepted.completion
            return completion.response("chat.completion.chunk", {"delta": delta}, finish_reason)

        try:
            yield event(chunk({"role": "assistant", "content": ""}))
            while (piece := await self._queue.get()) is not None:
                yield event(chunk({"content": piece}))
            try:
                reply = self._result()
            except ApiError as error:
                yield event(error.body())
                return
            if rest := self._pieces.rest(reply.text):
                yield event(chunk({"content": rest}))
            yield event(chunk({}, reply.finish_reason))
            if self.accepted.request.include_usage:
                usage = self.accepted.usage(reply)
                yield event(chunk({}) | {"choices": [], "usage": usage})
            yield END_OF_STREAM
        finally:
            self._cancelled.set()

    def _result(self) -> SampledReply:
        """The reply, or the error that ended it as one of the API."""
        try:
            return self.sampled.result()
        except ReplyTimedOut as error:
            seconds = self.completions.limits.timeout_seconds
            message = f"the reply was not finished within {seconds:g} seconds; ask for fewer tokens, or raise --timeout"
            raise ApiError(504, message, code="timeout", kind="timeout_error") from error
        except Exception as error:
            logger.exception("sampling a reply failed")
            raise internal_error() from error
