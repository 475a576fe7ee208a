"""The common yardstick of all arms of a seed: pairs of replies of SFT and policy to held-out prompts, with gold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlhf_core.config.evaluation import EvaluateConfig
from rlhf_core.config.loading import load_section
from rlhf_core.data.schema import Message, Preference, Prompt, read_rows
from rlhf_core.errors import DataError
from rlhf_core.evaluation.comparisons.comparison import compare, tie_margin_of
from rlhf_core.evaluation.judges.gold import GOLD_TIE_MARGIN, GoldJudge
from rlhf_core.evaluation.judges.human.pairs import TEST_PROMPTS
from rlhf_core.evaluation.judges.model import ModelJudge
from rlhf_core.evaluation.judges.names import JUDGE, MODELS, TRAINED_ON
from rlhf_core.evaluation.judges.pairwise import worst_disagreements
from rlhf_core.evaluation.regression import fixed_subset
from rlhf_core.evaluation.replies import evaluation_replies
from rlhf_core.evaluation.reply import Reply
from rlhf_core.models.starting.base import load_policy
from rlhf_core.storage.files import atomic_write_lines, split_json_lines

TRAINING_PAIRS = Path("data") / "clean" / "preferences" / "train.parquet"
Gains = npt.NDArray[np.float64]


@dataclass(frozen=True)
class HeldOutPair:
    """A held-out prompt with one reply of SFT and one of the policy that the pairs for annotation were sampled from.

    Attributes:
        gold_gain: Gold score of the policy's reply minus that of SFT's.
        bad_case: Whether the reward model of the unannotated workspace prefers the policy's reply and its judge SFT's.
    """

    prompt: list[dict[str, str]]
    sft_reply: str
    sft_finished: bool
    policy_reply: str
    policy_finished: bool
    gold_gain: float
    bad_case: bool

    @property
    def messages(self) -> list[Message]:
        """The prompt as models read it."""
        return [Message(**turn) for turn in self.prompt]


def held_out_pairs(file: Path, workspace: Path, prompts: int, replies: int) -> list[HeldOutPair]:
    """Return the pairs in ``file``; if it does not exist, sample them in ``workspace`` and write it.

    There are ``replies`` pairs in a row for each of at most ``prompts`` test prompts.
    """
    if file.is_file():
        return [HeldOutPair(**json.loads(line)) for line in split_json_lines(file.read_text(encoding="utf-8"))]
    config = load_section(workspace, "evaluate", EvaluateConfig)
    rows = fixed_subset(read_rows(workspace / TEST_PROMPTS, Prompt), prompts, "annotated cases")
    if not rows:
        raise DataError(f"{workspace / TEST_PROMPTS} has no rows")
    asked = [row.prompt for row in rows]
    sft, policy = (_replies(workspace / MODELS / name, asked, replies, config) for name in ("sft", "policy"))
    repeated = [prompt for prompt in asked for _ in range(replies)]
    gold_gain = np.subtract(GoldJudge().score(repeated, policy), GoldJudge().score(repeated, sft))
    reward = ModelJudge.load(workspace / MODELS / TRAINED_ON, TRAINED_ON, config.batch_size)
    judge = _judge(workspace, config)
    baseline = judge.score(repeated, sft)
    bad = worst_disagreements(
        np.subtract(reward.score(repeated, policy), reward.score(repeated, sft)),
        np.subtract(judge.score(repeated, policy), baseline),
        tie_margin_of(judge, config.tie_margin, baseline),
    )
    positions = {position for position, _ in bad}
    pairs = [
        HeldOutPair(
            prompt=[dict(vars(turn)) for turn in prompt],
            sft_reply=before.text,
            sft_finished=before.finished,
            policy_reply=after.text,
            policy_finished=after.finished,
            gold_gain=float(gain),
            bad_case=position in positions,
        )
        for position, (prompt, before, after, gain) in enumerate(zip(repeated, sft, policy, gold_gain, strict=True))
    ]
    atomic_write_lines(file, [asdict(pair) for pair in pairs])
    return pairs


def reward_metrics(arm: Path, pairs: Sequence[HeldOutPair]) -> dict[str, float]:
    """Measure the reward model of ``arm`` against gold on the held-out pairs, and on the bad cases among them.

    Raises:
        DataError: A held-out prompt is among the training pairs of ``arm``.
    """
    _require_held_out(arm, pairs)
    config = load_section(arm, "evaluate", EvaluateConfig)
    reward = ModelJudge.load(arm / MODELS / TRAINED_ON, TRAINED_ON, config.batch_size)
    prompts = [pair.messages for pair in pairs]
    # As text: the arms' tokenizers may differ, and all of them read the same.
    policy = reward.score(prompts, [Reply(pair.policy_reply, pair.policy_finished) for pair in pairs])
    sft = reward.score(prompts, [Reply(pair.sft_reply, pair.sft_finished) for pair in pairs])
    reward_gain, gold_gain = np.subtract(policy, sft), np.array([pair.gold_gain for pair in pairs])
    bad = np.array([pair.bad_case for pair in pairs], dtype=bool)
    accuracies = {
        "gold_accuracy": pairwise_accuracy(reward_gain, gold_gain),
        "gold_accuracy_bad_cases": pairwise_accuracy(reward_gain[bad], gold_gain[bad]),
    }
    return {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}


def pairwise_accuracy(reward_gain: Gains, gold_gain: Gains) -> float | None:
    """Return the share of pairs that reward orders as gold does; a tie of reward counts half.

    Pairs that tie by gold are left out; without any other the result is None.

    Args:
        reward_gain: Reward of the one reply minus that of the other (n,).
        gold_gain: The same of gold (n,).
    """
    decided = np.abs(gold_gain) > GOLD_TIE_MARGIN
    if not decided.any():
        return None
    agreement = np.sign(reward_gain[decided]) * np.sign(gold_gain[decided])
    return float(((agreement + 1) / 2).mean())


def policy_metrics(arm: Path, workspace: Path, pairs: Sequence[HeldOutPair], replies: int) -> dict[str, float]:
    """Measure the policy of ``arm`` on the held-out prompts by gold, and against SFT by the judge of ``workspace``.

    All arms of a seed have the same opponent and the same judge: SFT and judge of the unannotated workspace.
    """
    config = load_section(workspace, "evaluate", EvaluateConfig)
    prompts = [pair.messages for pair in pairs]
    own = _replies(arm / MODELS / "policy", prompts[::replies], replies, config)
    policy = [Reply(reply.text, reply.finished) for reply in own]
    sft = [Reply(pair.sft_reply, pair.sft_finished) for pair in pairs]
    judge = _judge(workspace, config)
    baseline = np.array(judge.score(prompts, sft))
    margin = tie_margin_of(judge, config.tie_margin, baseline.tolist())
    shape = (-1, replies)
    scores = np.array(judge.score(prompts, policy))
    compared = compare(scores.reshape(shape), baseline.reshape(shape), margin, seed=config.seed)
    return {
        "policy_gold": float(np.mean(GoldJudge().score(prompts, policy))),
        "policy_win_rate": compared["win_rate"],
    }


def _replies(model: Path, prompts: Sequence[Sequence[Message]], replies: int, config: EvaluateConfig) -> list[Reply]:
    """Sample ``replies`` in a row for each prompt by the evaluation's settings."""
    policy, tokenizer = load_policy(model)
    return evaluation_replies(
        policy,
        tokenizer,
        prompts,
        config.sampling,
        config.seed,
        batch_size=config.batch_size,
        replies_per_prompt=replies,
    )


def _judge(workspace: Path, config: EvaluateConfig) -> ModelJudge:
    name = JUDGE
    return ModelJudge.load(workspace / MODELS / name, name, config.batch_size)


def _require_held_out(arm: Path, pairs: Sequence[HeldOutPair]) -> None:
    trained = {tuple(turn.content for turn in row.prompt) for row in read_rows(arm / TRAINING_PAIRS, Preference)}
    leaked = sum(tuple(turn["content"] for turn in pair.prompt) in trained for pair in pairs)
    if leaked:
        raise DataError(f"{leaked} held-out pairs have a prompt that is in {arm / TRAINING_PAIRS}")
