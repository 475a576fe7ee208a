"""The LLM judge: every pair in both orders, answers kept on disk, junk counted and left out."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlhf_core.config.evaluation import TEMPLATE_FIELDS, LlmJudgeConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.evaluation.judges.llm.endpoint import AnswerCache, ChatEndpoint, Completion, UsageMeter
from rlhf_core.evaluation.judges.pairwise import LOSS, TIE, WIN, PairwiseJudgement, PairwiseJudgements
from rlhf_core.evaluation.reply import Reply
from rlhf_core.runtime.progress import progress

PACKAGE = "rlhf_core.evaluation.judges.llm"
FIELD = re.compile("|".join(map(re.escape, TEMPLATE_FIELDS)))
VERDICT_SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "verdict": {"type": "string", "enum": ["A", "B", "tie"]}},
    "required": ["reason", "verdict"],
    "additionalProperties": False,
}


def built_in_template() -> str:
    """Return the text that is used where ``llm_judge.template`` is null."""
    return files(PACKAGE).joinpath("pairwise_prompt.txt").read_text(encoding="utf-8")


def question_text(template: str, prompt: Sequence[Message], reply_a: str, reply_b: str) -> str:
    """Fill the template. A reply that contains ``{reply_b}`` stays what it is."""
    values = {
        "{conversation}": "\n\n".join(f"{turn.role}: {turn.content}" for turn in prompt),
        "{reply_a}": reply_a,
        "{reply_b}": reply_b,
    }
    text = FIELD.sub(lambda field: values[field.group()], template)
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be sent


def request_body(config: LlmJudgeConfig, text: str) -> dict[str, Any]:
    """Return the body of a chat completion that asks ``text`` at temperature 0."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": config.max_tokens,
    }
    if config.response_format == "json_object":
        body["response_format"] = {"type": "json_object"}
    if config.response_format == "json_schema":
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT_SCHEMA},
        }
    return body


def content_key(base_url: str, body: dict[str, Any]) -> str:
    """Return the SHA-256 of a request: the endpoint and everything that is asked of it."""
    return hashlib.sha256(json.dumps([base_url.rstrip("/"), body], sort_keys=True).encode()).hexdigest()


PREFERRED = {"a": "A", "b": "B", "tie": "tie"}
# Reading takes up to the square of the length, where many objects begin and none ends. No verdict needs as much.
LONGEST_ANSWER = 100_000


@dataclass(frozen=True)
class Verdict:
    """Which reply the model prefers: ``A``, ``B`` or ``tie``, and its reason."""

    preferred: str
    reason: str


def read_verdict(text: str) -> Verdict | None:
    """Return the verdict of the JSON objects in ``text`` that have one; None if there is none or they contradict.

    Text around the object (a code fence, reasoning before it) does not matter. An answer of more than
    ``LONGEST_ANSWER`` characters has no verdict.
    """
    if len(text) > LONGEST_ANSWER:
        return None
    try:
        objects = _json_objects(text)
    except RecursionError:
        return None
    verdicts = []
    for value in objects:
        preferred = value.get("verdict")
        if isinstance(preferred, str) and preferred.strip().lower() in PREFERRED:
            reason = value.get("reason")
            verdicts.append(Verdict(PREFERRED[preferred.strip().lower()], _writable(reason)))
        elif preferred is not None:
            return None
    if len({verdict.preferred for verdict in verdicts}) != 1:
        return None
    return verdicts[-1]


def _writable(reason: Any) -> str:
    """The reason if it is a text, without lone surrogates, which cannot be written to a file."""
    return reason.encode("utf-8", "replace").decode() if isinstance(reason, str) else ""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; one that names ``verdict`` twice, and differently, has one that is none."""
    value = dict(pairs)
    verdicts = [item for name, item in pairs if name == "verdict"]
    return value | {"verdict": verdicts} if any(item != verdicts[0] for item in verdicts) else value


def _json_objects(text: str) -> list[dict[str, Any]]:
    """All JSON objects in a text that are not part of another; ``RecursionError`` if one is nested without measure."""
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
OUTCOMES = ({"A": WIN, "tie": TIE, "B": LOSS}, {"A": LOSS, "tie": TIE, "B": WIN})  # candidate first, then second
JUNK_CHARACTERS = 80


@dataclass(frozen=True)
class LlmJudgeMetrics:
    """How the judge worked.

    Attributes:
        pairs: All pairs.
        identical: Pairs of equal texts, which tie without being asked about.
        junk_share: Share of the pairs that were asked about without a usable answer.
        order_disagreement: Share of those with one whose verdict changed with the order of the replies.
        first_preferred: Share of the verdicts for one reply that are for the one shown first; ½ without position bias.
        prompt_tokens: Tokens of all questions.
        completion_tokens: Tokens of all answers.
        cost: What they cost by ``evaluate.llm_judge.budget``; 0 without prices.
    """

    pairs: int
    identical: int
    junk_share: float
    order_disagreement: float
    first_preferred: float
    prompt_tokens: int
    completion_tokens: int
    cost: float


@dataclass(frozen=True)
class _Question:
    key: str
    body: dict[str, Any]


class LlmJudge:
    """Compares replies by a language model behind an OpenAI-compatible endpoint.

    Args:
        config: Endpoint, template and limits.
        answers: Folder of the answers that are known.
        wait: Sleeps for so many seconds; by default until the time is over or another request has failed for good.
        clock: Monotonic seconds.

    Raises:
        ConfigError: The environment variable of the token is not set, or holds no token.
    """

    name = "llm"

    def __init__(
        self,
        config: LlmJudgeConfig,
        answers: Path,
        wait: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.cache = AnswerCache(answers)
        self.stopped = threading.Event()
        self.failure: RlhfError | None = None
        self.endpoint = ChatEndpoint(config, wait or self._wait, clock)
        self.template = config.template or built_in_template()

    def judge(
        self, prompts: Sequence[Sequence[Message]], candidate: Sequence[Reply], baseline: Sequence[Reply]
    ) -> PairwiseJudgements:
        """Ask about each pair in both orders; answers that are known from before are not asked for again.

        A pair whose verdict changes with the order is a tie. A pair with an unusable answer has no outcome.

        Raises:
            DataError: The endpoint cannot be used, the budget is spent, or too many answers are unusable. All answers
                until then are kept.
        """
        pairs = [
            None if first.text == second.text else self._questions(prompt, first.text, second.text)
            for prompt, first, second in zip(prompts, candidate, baseline, strict=True)
        ]
        asked = [pair for pair in pairs if pair is not None]
        usage = UsageMeter(self.config.budget)
        completions = self._completions(asked, usage)
        verdicts = {key: read_verdict(completion.text) for key, completion in completions.items()}
        judgements = [
            PairwiseJudgement(TIE, "both replies are the same")
            if pair is None
            else combined(*(verdicts[question.key] for question in pair))
            for pair in pairs
        ]
        junk = [i for i, judgement in enumerate(judgements) if judgement.outcome is None]
        if len(junk) > self.config.max_junk * len(asked):
            example = next(
                completions[question.key] for question in pairs[junk[0]] or () if verdicts[question.key] is None
            )
            raise DataError(self._too_much_junk(len(junk), len(asked), example))
        metrics = self._metrics(asked, verdicts, judgements, usage)
        return PairwiseJudgements(judgements, asdict(metrics))

    def _questions(self, prompt: Sequence[Message], candidate: str, baseline: str) -> tuple[_Question, _Question]:
        """The question with the candidate's reply first, and with the baseline's first."""
        bodies = [
            request_body(self.config, question_text(self.template, prompt, *replies))
            for replies in ((candidate, baseline), (baseline, candidate))
        ]
        first, second = (_Question(content_key(self.config.base_url, body), body) for body in bodies)
        return first, second

    def _completions(self, pairs: Sequence[tuple[_Question, _Question]], usage: UsageMeter) -> dict[str, Completion]:
        """The answers to all questions, by key."""
        questions = {question.key: question for pair in pairs for question in pair}
        answers = {key: answer for key in questions if (answer := self.cache.get(key)) is not None}
        missing = [question for key, question in questions.items() if key not in answers]
        pool = ThreadPoolExecutor(self.config.concurrency, thread_name_prefix="llm-judge")
        self.failure = None
        self.stopped.clear()
        try:
            for completion in answers.values():
                usage.add(completion)
            futures = {pool.submit(self._ask, question, usage): question.key for question in missing}
            with progress(len(questions), "llm judge") as bar:
                bar.advance(len(answers))
                for future in as_completed(futures):
                    answers[futures[future]] = future.result()
                    bar.advance()
        except RlhfError as error:
            self._stop(pool)
            judged = sum(all(self.cache.get(question.key) is not None for question in pair) for pair in pairs)
            raise DataError(
                f"llm judge: {error}; the answers on {judged} of {len(pairs)} pairs are kept, and the next run asks "
                "for the others alone"
            ) from error
        finally:
            self._stop(pool)
        return answers

    def _ask(self, question: _Question, usage: UsageMeter) -> Completion:
        if self.failure is not None:
            raise self.failure
        try:
            usage.require_budget()
            completion = self.endpoint.complete(question.body)
            if not completion.refused:
                self.cache.put(question.key, question.body, completion)
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

    def _too_much_junk(self, junk: int, pairs: int, example: Completion) -> str:
        excerpt = example.refused or repr(" ".join(example.text.split())[:JUNK_CHARACTERS])
        return (
            f"llm judge: {junk} of {pairs} pairs of different replies have no usable answer, more than "
            f"evaluate.llm_judge.max_junk ({self.config.max_junk:.0%}) allows, so nothing is compared; the first one: "
            f"{excerpt}; try another model, template or response_format"
        )

    def _metrics(
        self,
        pairs: Sequence[tuple[_Question, _Question]],
        verdicts: Mapping[str, Verdict | None],
        judgements: Sequence[PairwiseJudgement],
        usage: UsageMeter,
    ) -> LlmJudgeMetrics:
        asked = [[verdicts[question.key] for question in pair] for pair in pairs]
        both = [(first, second) for first, second in asked if first is not None and second is not None]
        changed = sum(OUTCOMES[0][a.preferred] != OUTCOMES[1][b.preferred] for a, b in both)
        decided = [v.preferred for pair in both for v in pair if v.preferred != "tie"]
        return LlmJudgeMetrics(
            pairs=len(judgements),
            identical=len(judgements) - len(pairs),
            junk_share=1 - len(both) / len(pairs) if pairs else 0.0,
            order_disagreement=changed / len(both) if both else 0.0,
            first_preferred=decided.count("A") / len(decided) if decided else 0.5,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cost=usage.cost,
        )


def combined(candidate_first: Verdict | None, baseline_first: Verdict | None) -> PairwiseJudgement:
    """Combine the verdicts of both orders: a tie where they contradict, no outcome where one is missing."""
    if candidate_first is None or baseline_first is None:
        return PairwiseJudgement(None)
    outcomes = [OUTCOMES[0][candidate_first.preferred], OUTCOMES[1][baseline_first.preferred]]
    if outcomes[0] == outcomes[1]:
        return PairwiseJudgement(outcomes[0], candidate_first.reason)
    reason = f"the order decides: {candidate_first.reason} / {baseline_first.reason}"
    return PairwiseJudgement(TIE, reason)
