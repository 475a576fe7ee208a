"""The LLM judge: every pair in both orders, answers kept on disk, junk counted and left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config.evaluation import LlmJudgeConfig
from rlhf_core.data.schema import Message
from rlhf_core.errors import DataError, RlhfError
from rlhf_core.evaluation.judges.llm.answer_cache import AnswerCache
from rlhf_core.evaluation.judges.llm.endpoint import ChatEndpoint, Completion
from rlhf_core.evaluation.judges.llm.question import built_in_template, content_key, question_text, request_body
from rlhf_core.evaluation.judges.llm.usage import UsageMeter
from rlhf_core.evaluation.judges.llm.verdict import Verdict, read_verdict
from rlhf_core.evaluation.judges.pairwise import LOSS, TIE, WIN, PairwiseJudgement, PairwiseJudgements
from rlhf_core.evaluation.replies.reply import Reply
from rlhf_core.runtime.progress import progress

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
