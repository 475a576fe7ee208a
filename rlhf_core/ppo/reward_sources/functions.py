"""Rewards by a function of the user's own.

Here is how it is called, what it may read of a prompt's record, and how long it may take.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_core.ppo.reward_sources.source import Replies, checked_rewards
from rlhf_core.runtime.user_function import TimeLimitExceeded, describe_failure, time_limit

Function = Callable[..., Any]
CallMode = Literal["batch", "single"]
OPEN_CALLS = 64  # of an asynchronous function for single replies, at a time
TURNS = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class FunctionReward:
    """A reward function with the way in which it is called.

    Attributes:
        function: ``f(prompts, replies, …)`` with one number per reply, or with ``call`` single
            ``f(prompt, reply, …)`` with one number; plain or ``async``. A prompt is its turns, as
            ``{"role", "content"}``. Further parameters get the columns of those names from the
            records of the prompts. None in place of a number says that a reply cannot be scored:
            nothing is learned from it.
        call: Once for all replies of a rollout, or for each.
        timeout_seconds: Bounds a call; None: no bound. A single reply that takes longer cannot be
            scored; a batch that does ends the run. A function that is not ``async`` is interrupted
            in the main thread alone.
    """

    function: Function
    call: CallMode = "batch"
    timeout_seconds: float | None = None


class PythonFunction:
    """Calls a function of the user's on each rank with its share of the replies.

    Same replies must give same scores for an exact resume. Metric ``timeouts``, where there is a
    limit: the share of single replies that took too long.
    """

    may_decline = True  # its NaN is a reply that cannot be scored, and no accident

    def __init__(
        self, given: Function | FunctionReward, who: str, columns: Sequence[str] = ()
    ) -> None:
        if isinstance(given, FunctionReward):
            self.given = given
        else:
            self.given = FunctionReward(given)
        self.who = who
        self.read = columns_read(self.given.function, columns, who)
        self.metrics: dict[str, float] = {}

    def rewards(self, replies: Replies) -> Tensor:
        """(B,); NaN where a reply cannot be scored.

        Raises:
            DataError: The function raised, took too long, or did not return one finite number or
                None per reply.
        """
        prompts = []
        for prompt in replies.prompts:
            prompts.append([asdict(turn) for turn in prompt])
        columns = {name: list(replies.columns[name]) for name in self.read}
        scores, timeouts = self.scores(prompts, list(replies.texts), columns)
        rewards = checked_rewards(scores, replies, self.who, none_is_unscored=True)
        if self.given.timeout_seconds is not None:
            self.metrics = {"timeouts": timeouts / max(len(rewards), 1)}
        return rewards

    def scores(
        self,
        prompts: list[list[dict[str, str]]],
        replies: list[str],
        columns: Mapping[str, list[Any]],
    ) -> tuple[Any, int]:
        """What the function gives for ``replies``, as it is, and how many of them took too long."""
        if self.given.call == "batch":
            return self._whole(lambda: self.given.function(prompts, replies, **columns)), 0
        calls = []
        for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
            own_columns = {name: column[row] for name, column in columns.items()}
            calls.append(_Call(self.given.function, prompt, reply, own_columns))
        if is_async(self.given.function):
            results = self._side_by_side(calls)
        else:
            results = [self._one(call) for call in calls]
        scores: list[Any] = []
        late = 0
        for result in results:
            if result is TOO_LATE:
                late += 1
                scores.append(None)
            else:
                scores.append(result)
        return scores, late

    def _whole(self, call: Callable[[], Any]) -> Any:
        seconds = self.given.timeout_seconds
        try:
            if is_async(self.given.function):
                return run_to_end(asyncio.wait_for, call, seconds)
            return _within(seconds, call)
        except (TimeLimitExceeded, TimeoutError) as error:
            if seconds is None:  # a limit of its own
                raise DataError(f"{self.who} {describe_failure(error)}") from error
            raise DataError(
                f"{self.who} took more than {seconds:g} s; make it faster, raise timeout_seconds, or let it score "
                "single replies"
            ) from error
        except (Exception, SystemExit) as error:
            raise DataError(f"{self.who} {describe_failure(error)}") from error

    def _one(self, call: _Call) -> Any:
        try:
            return _within(self.given.timeout_seconds, call)
        except TimeLimitExceeded:
            return TOO_LATE
        except (Exception, SystemExit) as error:
            raise DataError(
                f"{self.who} {describe_failure(error)}, scoring {call.reply[:60]!r}"
            ) from error

    def _side_by_side(self, calls: Sequence[_Call]) -> list[Any]:
        seconds = self.given.timeout_seconds

        async def one(call: _Call, room: asyncio.Semaphore) -> Any:
            async with room:
                try:
                    return await asyncio.wait_for(call(), seconds)
                except TimeoutError:
                    if seconds is None:
                        raise
                    return TOO_LATE

        async def every() -> list[Any]:
            room = asyncio.Semaphore(OPEN_CALLS)
            return list(await asyncio.gather(*(one(call, room) for call in calls)))

        try:
            return list(run_to_end(lambda work, _: work, every, None))
        except (Exception, SystemExit) as error:
            raise DataError(f"{self.who} {describe_failure(error)}") from error


class PluggedSource:
    """The rewards of a package's source, each checked."""

    def __init__(self, score: Function, who: str) -> None:
        self.score = score
        self.who = who
        self.may_decline = getattr(score, "may_decline", True)
        self.metrics: dict[str, float] = {}

    def rewards(self, replies: Replies) -> Tensor:
        """(B,); NaN where a reply cannot be scored.

        Raises:
            DataError: The source raised, or did not return one finite number or None per reply.
        """
        try:
            scores = self.score(replies)
        except RlhfError:  # says itself what is wrong
            raise
        except (Exception, SystemExit) as error:
            raise DataError(f"{self.who} {describe_failure(error)}") from error
        self.metrics = dict(getattr(self.score, "metrics", {}))
        return checked_rewards(scores, replies, self.who, none_is_unscored=self.may_decline)


@dataclass(frozen=True)
class _Call:
    """One call for one reply."""

    function: Function
    prompt: list[dict[str, str]]
    reply: str
    columns: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(self.prompt, self.reply, **self.columns)


TOO_LATE = object()


def _within(seconds: float | None, call: Callable[[], Any]) -> Any:
    if seconds is None:
        return call()
    with time_limit(seconds):
        return call()


def is_async(function: Function) -> bool:
    """Whether a call gives something to be awaited."""
    called = function
    if not inspect.isroutine(function):
        called = getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def run_to_end(
    bounded: Callable[[Awaitable[Any], float | None], Awaitable[Any]],
    start: Callable[[], Awaitable[Any]],
    seconds: float | None,
) -> Any:
    """Await ``start()`` in a thread with an event loop of its own.

    A notebook's thread runs one already.
    """

    async def whole() -> Any:
        return await bounded(start(), seconds)

    with ThreadPoolExecutor(1, thread_name_prefix="reward") as thread:
        return thread.submit(asyncio.run, whole()).result()


def columns_read(function: Function, columns: Sequence[str], who: str) -> tuple[str, ...]:
    """The columns of the prompts' records that ``function`` asks for by name.

    Its parameters after prompts and replies name them.

    Args:
        function: One with ``**columns`` gets all of them.
        columns: The names that there are.
        who: What messages call the function.

    Raises:
        ConfigError: It asks for one that there is not, without a default.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some of those written in C do not tell
        return ()
    positional = [parameter for parameter in parameters if parameter.kind in TURNS][:2]
    taken = {parameter.name for parameter in positional}
    read = []
    for parameter in parameters:
        if parameter in positional or parameter.kind not in BY_NAME:
            continue
        if parameter.name in columns:
            read.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            known = ", ".join(columns) or "none"
            raise ConfigError(
                f"{who} asks for {parameter.name}, which the records of the prompts do not have; their columns: {known}"
            )
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(name for name in columns if name not in taken)
    return tuple(read)
