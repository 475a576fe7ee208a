"""The LLM judge: every pair in both orders, answers kept on disk, junk counted and left out.

It asks an OpenAI-compatible endpoint for chat completions, under a rate limit and with retries.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rlhf_core.config.evaluation import TEMPLATE_FIELDS, LlmBudgetConfig, LlmJudgeConfig
from rlhf_core.data.schema import Message
from rlhf_core.data.text import writable
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.evaluation.judges.model import PairwiseJudge, PairwiseJudgements
from rlhf_core.evaluation.replies import Reply
from rlhf_core.runtime.progress import progress
from rlhf_core.storage.files import atomic_write_json, read_json
from rlhf_extras.http_retry import (
    bearer_token,
    describe_answer,
    is_final,
    json_content,
    post_json,
)

REFUSED = frozenset(
    {400, 413, 422}
)  # of one request, such as a prompt that is too long for the model
MOST_TOKENS = 10**9  # of a count that an endpoint can mean


@dataclass(frozen=True)
class Completion:
    """What a model answered, and how many tokens that used; None where the endpoint is silent.

    ``refused`` says why the endpoint did not take the request; empty if it did.
    """

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    refused: str = ""


class RateLimiter:
    """Spaces requests so that at most ``per_minute`` begin in a minute; None does not limit."""

    def __init__(
        self,
        per_minute: float | None,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval = 60.0 / per_minute if per_minute else 0.0
        self.wait, self.clock = wait, clock
        self._lock = threading.Lock()
        self._next_start = clock()

    def acquire(self) -> None:
        """Wait until the next request may begin."""
        with self._lock:
            now = self.clock()
            start = max(now, self._next_start)
            self._next_start = start + self.interval
        if start > now:
            self.wait(start - now)


class ChatEndpoint:
    """Asks an OpenAI-compatible endpoint; several threads may share it.

    ``wait`` sleeps for so many seconds.

    Raises:
        ConfigError: The environment variable of the token is not set, or holds no token.
    """

    def __init__(
        self,
        config: LlmJudgeConfig,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.wait = config, wait
        self.url = f"{config.base_url.rstrip('/')}/chat/completions"
        self.token = bearer_token(config.token_env, "llm judge")
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.client = httpx.Client(timeout=config.timeout_seconds, headers=headers)
        self.rate = RateLimiter(config.requests_per_minute, wait, clock)

    def complete(self, body: dict[str, Any]) -> Completion:
        """Ask once, with retries.

        Raises:
            RetriesExhausted: The endpoint stayed out of reach, or gave no whole answer.
            DataError: It refuses every request, such as for a wrong token or an unknown model.
        """
        self.rate.acquire()
        answer = post_json(
            self.client,
            self.url,
            body,
            retries=self.config.retries,
            wait=self._wait_for_retry,
            secret=self.token,
            final=lambda answer: (
                is_final(answer) and (answer.status_code != 200 or _message(answer) is not None)
            ),
        )
        if answer.status_code in REFUSED:
            return Completion("", None, None, refused=describe_answer(answer, self.token))
        message = _message(answer) if answer.status_code == 200 else None
        if message is None:
            raise DataError(
                f"{self.url} {describe_answer(answer, self.token)}; check base_url, model and token_env"
            )
        content, usage = message.get("content"), answer.json().get("usage")
        # One character more than is read, so that it is not read: whatever an endpoint sends is kept.
        text = writable(content[: LONGEST_ANSWER + 1]) if isinstance(content, str) else ""
        text = (
            text.replace(self.token, "***") if self.token else text
        )  # some proxies answer with the request's headers
        counts = usage if isinstance(usage, dict) else {}
        return Completion(
            text,
            token_count(counts.get("prompt_tokens")),
            token_count(counts.get("completion_tokens")),
        )

    def _wait_for_retry(self, seconds: float) -> None:
        """Sleep; a request that is repeated counts for the rate limit like any other."""
        self.wait(seconds)
        self.rate.acquire()


def _message(answer: httpx.Response) -> dict[str, Any] | None:
    """Return the message of a chat completion; None if the body is not a chat completion."""
    try:
        message = json_content(answer)["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        return None
    return message if isinstance(message, dict) else None


def token_count(value: Any) -> int | None:
    """Return a number of tokens; None for anything else."""
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
        else None
    )


class AnswerCache:
    """Keeps each answer as soon as it is there: a repeated evaluation asks for the others alone.

    Files are written atomically and hold the request beside the answer. Several processes may use
    the same folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Completion | None:
        """Return the answer to a request; None if there is none, or its file is damaged."""
        try:
            stored = read_json(self._path(key))
            text, *counts = stored["text"], stored["prompt_tokens"], stored["completion_tokens"]
        except (DataError, KeyError, TypeError, ValueError, RecursionError, OSError):
            return None
        are_counts = all(count is None or token_count(count) is not None for count in counts)
        return Completion(text, *counts) if isinstance(text, str) and are_counts else None

    def put(self, key: str, request: dict[str, Any], completion: Completion) -> None:
        """Store the answer to a request."""
        answer = asdict(completion)
        del answer["refused"]
        atomic_write_json(self._path(key), {"request": request} | answer)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


class UsageMeter:
    """Counts tokens and money; several threads may share it."""

    def __init__(self, budget: LlmBudgetConfig) -> None:
        self.budget = budget
        self.prompt_tokens = self.completion_tokens = 0
        self._lock = threading.Lock()

    @property
    def cost(self) -> float:
        """Money, 0 without prices."""
        return self.budget.cost(self.prompt_tokens, self.completion_tokens)

    def add(self, completion: Completion) -> None:
        """Count an answer.

        Raises:
            DataError: There is a budget, and the endpoint does not say what the answer used.
        """
        if completion.refused:
            return
        if self.budget.is_limited and None in (
            completion.prompt_tokens,
            completion.completion_tokens,
        ):
            raise DataError("the endpoint does not say how many tokens it used, so evaluate.llm_judge.budget "
                            "cannot be kept; take the budget out")  # fmt: skip
        with self._lock:
            self.prompt_tokens += completion.prompt_tokens or 0
            self.completion_tokens += completion.completion_tokens or 0

    def require_budget(self) -> None:
        """Allow another request.

        Raises:
            DataError: The budget is spent.
        """
        tokens, budget = self.prompt_tokens + self.completion_tokens, self.budget
        if budget.tokens is not None and tokens >= budget.tokens:
            raise DataError(f"the budget of {budget.tokens:,} tokens is spent ({tokens:,} used); raise "
                            "evaluate.llm_judge.budget.tokens to go on")  # fmt: skip
        if budget.money is not None and self.cost >= budget.money:
            raise DataError(f"the budget of {budget.money:g} is spent ({self.cost:.4g} used); raise "
                            "evaluate.llm_judge.budget.money to go on")  # fmt: skip


PACKAGE = "rlhf_extras.evaluations"
FIELD = re.compile("|".join(map(re.escape, TEMPLATE_FIELDS)))
VERDICT_SCHEMA = {
    "type": "object",
    "properties": {
        "reason": {"type": "string"},
        "verdict": {"type": "string", "enum": ["A", "B", "tie"]},
    },
    "required": ["reason", "verdict"],
    "additionalProperties": False,
}
FORMATS: dict[str, dict[str, Any]] = {
    "json_object": {"type": "json_object"},
    "json_schema": {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT_SCHEMA},
    },
}


def built_in_template() -> str:
    """Return the text that is used where ``llm_judge.template`` is null."""
    return files(PACKAGE).joinpath("llm_judge.txt").read_text(encoding="utf-8")


def question_text(template: str, prompt: Sequence[Message], reply_a: str, reply_b: str) -> str:
    """Fill the template. A reply that contains ``{reply_b}`` stays what it is."""
    values = {
        "{conversation}": "\n\n".join(f"{turn.role}: {turn.content}" for turn in prompt),
        "{reply_a}": reply_a,
        "{reply_b}": reply_b,
    }
    return writable(FIELD.sub(lambda field: values[field.group()], template))


def request_body(config: LlmJudgeConfig, text: str) -> dict[str, Any]:
    """Return the body of a chat completion that asks ``text`` at temperature 0."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": config.max_tokens,
    }
    return body | (
        {"response_format": FORMATS[config.response_format]}
        if config.response_format in FORMATS
        else {}
    )


def content_key(base_url: str, body: dict[str, Any]) -> str:
    """Return the SHA-256 of a request: the endpoint and everything that is asked of it."""
    return hashlib.sha256(
        json.dumps([base_url.rstrip("/"), body], sort_keys=True).encode()
    ).hexdigest()


PREFERRED = {"a": "A", "b": "B", "tie": "tie"}
# Reading takes up to the square of the length, where many objects begin and none ends. No verdict
# needs as much.
LONGEST_ANSWER = 100_000


@dataclass(frozen=True)
class Verdict:
    """Which reply the model prefers: ``A``, ``B`` or ``tie``, and its reason."""

    preferred: str
    reason: str


def read_verdict(text: str) -> Verdict | None:
    """Return the verdict of the JSON objects in ``text``; None for none or a contradiction.

    Text around the object (a code fence, reasoning before it) does not matter. An answer of more
    than ``LONGEST_ANSWER`` characters has no verdict.
    """
    try:
        objects = _json_objects(text) if len(text) <= LONGEST_ANSWER else []
    except RecursionError:
        return None
    verdicts: set[str | None] = set()
    reason: Any = None
    for value in objects:
        verdict = value.get("verdict")
        if verdict is None:
            continue
        known = isinstance(verdict, str)
        verdicts.add(PREFERRED.get(verdict.strip().lower()) if known else None)
        reason = value.get("reason")
    preferred = verdicts.pop() if len(verdicts) == 1 else None
    if preferred is None:
        return None
    return Verdict(preferred, writable(reason) if isinstance(reason, str) else "")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; two different values of ``verdict`` count as no verdict."""
    value = dict(pairs)
    verdicts = [item for name, item in pairs if name == "verdict"]
    if any(item != verdicts[0] for item in verdicts):
        value["verdict"] = verdicts
    return value


def _json_objects(text: str) -> list[dict[str, Any]]:
    """Return all JSON objects in a text that are not part of another one.

    Raises:
        RecursionError: One is nested too deeply.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_without_repeats)
    objects = []
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:  # no JSON, or a number of thousands of digits
            end = start + 1
        else:
            objects.append(value)
        start = text.find("{", end)
    return objects


ANSWERS = Path(".rlhf") / "llm_judge"
WIN, TIE, LOSS = 1.0, 0.5, 0.0
# With the candidate's reply shown first, then with it shown second.
OUTCOMES = ({"A": WIN, "tie": TIE, "B": LOSS}, {"A": LOSS, "tie": TIE, "B": WIN})
JUNK_CHARACTERS = 80


class LlmJudge(PairwiseJudge):
    """Compares replies by a language model behind an OpenAI-compatible endpoint.

    Args:
        config: Endpoint, template and limits.
        workspace: The folder in which answers are kept, in ``.rlhf/llm_judge``.
        wait: Sleeps for so many seconds; by default until the time is over or another request has
            failed for good.
        clock: Monotonic seconds.

    Raises:
        ConfigError: The environment variable of the token is not set, or holds no token.
    """

    name = "llm"

    def __init__(
        self,
        config: LlmJudgeConfig,
        workspace: Path,
        wait: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.cache = AnswerCache(workspace / ANSWERS)
        self.stopped = threading.Event()
        self.failure: RlhfError | None = None
        self.endpoint = ChatEndpoint(config, wait or self._wait, clock)
        self.template = config.template or built_in_template()

    def judge(
        self,
        prompts: Sequence[Sequence[Message]],
        candidate: Sequence[Reply],
        baseline: Sequence[Reply],
    ) -> PairwiseJudgements:
        """Ask about each pair in both orders; answers from earlier runs are used again.

        A pair whose verdict changes with the order is a tie. A pair with an unusable answer has no
        outcome.

        Returns:
            With the metrics ``pairs``, all of them; ``identical``, those of equal texts, which tie
            without being asked about; ``junk_share`` of the pairs that were asked about, without a
            usable answer; ``order_disagreement``, the share of those with one whose verdict changed
            with the order; ``first_preferred``, the share of the verdicts for one reply that are
            for the one shown first, ½ without position bias; ``prompt_tokens`` and
            ``completion_tokens``; ``cost`` by ``evaluate.llm_judge.budget``, 0 without prices.

        Raises:
            DataError: The endpoint cannot be used, the budget is spent, or too many answers are
                unusable. All answers until then are kept.
        """
        bodies: dict[str, dict[str, Any]] = {}
        pairs: list[tuple[str, ...] | None] = []  # the keys of both questions about a pair
        for prompt, own, other in zip(prompts, candidate, baseline, strict=True):
            if own.text == other.text:
                pairs.append(None)
                continue
            keys = []
            for first_shown, second_shown in ((own.text, other.text), (other.text, own.text)):
                question = question_text(self.template, prompt, first_shown, second_shown)
                body = request_body(self.config, question)
                keys.append(content_key(self.config.base_url, body))
                bodies[keys[-1]] = body
            pairs.append(tuple(keys))
        asked = [pair for pair in pairs if pair is not None]
        usage = UsageMeter(self.config.budget)
        completions = self._completions(bodies, asked, usage)
        verdicts = {key: read_verdict(completion.text) for key, completion in completions.items()}
        outcomes: list[float] = []
        reasons: list[str] = []
        answered, changed = 0, 0
        preferred: list[str] = []
        for pair in pairs:
            if pair is None:
                outcomes.append(TIE)
                reasons.append("both replies are the same")
                continue
            first, second = map(verdicts.get, pair)
            outcome, reason = combined(first, second)
            outcomes.append(outcome)
            reasons.append(reason)
            if first is not None and second is not None:
                answered += 1
                changed += OUTCOMES[0][first.preferred] != OUTCOMES[1][second.preferred]
                preferred += [first.preferred, second.preferred]
        junk = len(asked) - answered
        if junk > self.config.max_junk * len(asked):
            questions = chain.from_iterable(asked)
            example = completions[next(key for key in questions if verdicts[key] is None)]
            beginning = " ".join(example.text.split())[:JUNK_CHARACTERS]
            raise DataError(
                f"llm judge: {junk} of {len(asked)} pairs of different replies have no usable answer, more than "
                f"evaluate.llm_judge.max_junk ({self.config.max_junk:.0%}) allows, so nothing is compared; the first "
                f"one: {example.refused or repr(beginning)}; try another model, template or response_format"
            )
        junk_share, order_disagreement, first_preferred = 0.0, 0.0, 0.5
        if asked:
            junk_share = 1 - answered / len(asked)
        if answered:
            order_disagreement = changed / answered
        decided = preferred.count("A") + preferred.count("B")
        if decided:
            first_preferred = preferred.count("A") / decided
        metrics = {
            "pairs": len(pairs),
            "identical": len(pairs) - len(asked),
            "junk_share": junk_share,
            "order_disagreement": order_disagreement,
            "first_preferred": first_preferred,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cost": usage.cost,
        }
        return PairwiseJudgements(np.array(outcomes), reasons, metrics)

    def _completions(
        self,
        bodies: Mapping[str, dict[str, Any]],
        pairs: Sequence[tuple[str, ...]],
        usage: UsageMeter,
    ) -> dict[str, Completion]:
        """Return the answers to all questions, by key."""
        answers: dict[str, Completion] = {}
        for key in bodies:
            known = self.cache.get(key)
            if known is not None:
                answers[key] = known
        pool = ThreadPoolExecutor(self.config.concurrency, thread_name_prefix="llm-judge")
        self.failure = None
        self.stopped.clear()
        try:
            for completion in answers.values():
                usage.add(completion)
            futures = {}
            for key, body in bodies.items():
                if key not in answers:
                    futures[pool.submit(self._ask, key, body, usage)] = key
            with progress(len(bodies), "llm judge") as bar:
                bar.advance(len(answers))
                for future in as_completed(futures):
                    answers[futures[future]] = future.result()
                    bar.advance()
        except RlhfError as error:
            self._stop(pool)
            judged = 0
            for first, second in pairs:
                if self.cache.get(first) is not None and self.cache.get(second) is not None:
                    judged += 1
            raise DataError(
                f"llm judge: {error}; the answers on {judged} of {len(pairs)} pairs are kept, and the next run asks "
                "for the others alone"
            ) from error
        finally:
            self._stop(pool)
        return answers

    def _ask(self, key: str, body: dict[str, Any], usage: UsageMeter) -> Completion:
        if self.failure is not None:
            raise self.failure
        try:
            usage.require_budget()
            completion = self.endpoint.complete(body)
            if not completion.refused:
                self.cache.put(key, body, completion)
            usage.add(completion)
        except RlhfError as error:
            self.failure = self.failure or error
            self.stopped.set()
            raise
        return completion

    def _wait(self, seconds: float) -> None:
        """Sleep, unless another request has failed for good."""
        if self.stopped.wait(seconds):
            raise self.failure or DataError("stopped")

    def _stop(self, pool: ThreadPoolExecutor) -> None:
        """Let no further request begin, and wait for those under way."""
        self.stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)


def combined(candidate_first: Verdict | None, baseline_first: Verdict | None) -> tuple[float, str]:
    """Return outcome and reason: a tie where the orders contradict, NaN where one is missing."""
    if candidate_first is None or baseline_first is None:
        return math.nan, ""
    outcome = OUTCOMES[0][candidate_first.preferred]
    if outcome == OUTCOMES[1][baseline_first.preferred]:
        return outcome, candidate_first.reason
    return TIE, f"the order decides: {candidate_first.reason} / {baseline_first.reason}"
