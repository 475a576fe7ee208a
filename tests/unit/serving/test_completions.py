"""A reply that nobody waits for any more is not sampled to its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from unit.serving.conftest import Served

from rlhf_core.serving.completions import ReplyInProgress
from rlhf_core.serving.protocol import ApiError, ServingLimits, parse_chat_request


async def held_reply(served: Served, **fields: object) -> ReplyInProgress:
    """A reply whose first token is there, and whose second waits for ``policy.go``."""
    body = {"messages": [{"role": "user", "content": "the sky"}], **fields}
    served.policy.hold()
    reply = await served.completions.begin(parse_chat_request(json.dumps(body).encode()))
    await asyncio.to_thread(served.policy.holding.acquire)
    return reply


async def ended(served: Served, reply: ReplyInProgress) -> None:
    """Let the thread go on, and wait for its end."""
    served.policy.go.set()
    await asyncio.wait({reply.sampled})
    await asyncio.sleep(0)


def test_a_client_that_leaves_ends_its_reply(served: Served) -> None:
    async def left() -> None:
        return

    async def story() -> None:
        reply = await held_reply(served)
        with pytest.raises(ApiError, match="closed the connection"):
            await reply.whole(left)
        assert served.completions.in_flight == 1  # the thread is still busy
        await ended(served, reply)

    asyncio.run(story())
    assert served.metric("rlhf_serve_replies_total", end="cancelled") == 1
    assert served.completions.in_flight == 0


def test_a_stream_that_is_closed_ends_its_reply(served: Served) -> None:
    async def story() -> None:
        reply = await held_reply(served, stream=True)
        events = reply.events()
        assert b'"role": "assistant"' in await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        await ended(served, reply)

    asyncio.run(story())
    assert served.metric("rlhf_serve_replies_total", end="cancelled") == 1
    assert served.completions.in_flight == 0


def test_a_request_that_is_not_accepted_takes_no_place(serve: Callable[..., Served]) -> None:
    served = serve(ServingLimits(max_prompt_tokens=1, max_concurrent=1))
    request = parse_chat_request(b'{"messages": [{"role": "user", "content": "the sky"}]}')
    for _ in range(3):
        with pytest.raises(ApiError, match="at most 1"):
            asyncio.run(served.completions.begin(request))
    assert served.completions.in_flight == 0
