"""What checkpoints are selected by: the referee's win rate against SFT, and the drift from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedModel

from rlhf_core.data.schema import Prompt
from rlhf_core.data.statistics import clusters_of
from rlhf_core.evaluation.comparisons.comparison import compare, tie_margin_of
from rlhf_core.evaluation.judges.model import Judge
from rlhf_core.evaluation.perplexity import measure_drift
from rlhf_core.evaluation.replies import OnPolicyReplies, measure_text

TIE_MARGIN = 0.05  # differences up to this share of the spread of SFT's scores are ties
WIN_RATE_METRICS = ("win_rate", "win_rate_low95", "win_rate_high95")
TEXT_METRICS = ("length", "repetition", "missing_eos", "special_tokens")
SampleReplies = Callable[[PreTrainedModel], OnPolicyReplies]


class SelectionEvaluator:
    """Measures checkpoints on fixed prompts against SFT, whose replies are sampled and judged once.

    Args:
        reference: The SFT model.
        prompts: The fixed validation prompts.
        referee: The judge that decides.
        sample: Samples a model's replies to ``prompts`` from the training distribution, with the
            same random numbers for every model: the metrics are then a function of the weights
            alone, and a resumed run repeats them.
        reward: The reward model that the policy is optimised against, for ``referee_gap`` only.
    """

    def __init__(
        self,
        reference: PreTrainedModel,
        prompts: Sequence[Prompt],
        referee: Judge,
        sample: SampleReplies,
        reward: Judge | None = None,
    ) -> None:
        self.reference = reference
        self.sample = sample
        self.prompts = [row.prompt for row in prompts]
        self.clusters = clusters_of(prompts)
        self.referee = referee
        self.reward = reward
        replies = sample(reference).replies
        self.sft_text = measure_text(replies)
        self.sft_referee = referee.score(self.prompts, replies)
        if reward is not None:
            self.sft_reward = reward.score(self.prompts, replies)
        else:
            self.sft_reward = []

    def __call__(self, policy: PreTrainedModel) -> dict[str, float]:
        """Sample, judge and compare one checkpoint on the fixed prompts.

        Returns:
            ``win_rate`` of the referee against SFT with bootstrap bounds ``_low95`` and ``_high95``
            over different questions; ``kl`` in nats per sequence to SFT; ``length`` in tokens and
            ``length_ratio`` over SFT's; ``repetition``, the share of repeated trigrams, and
            ``repetition_increase``, minus SFT's; ``missing_eos`` and ``special_tokens``, shares of
            replies; with a reward model ``referee_gap``, by how many standard deviations of SFT's
            scores the reward's gain exceeds the referee's.
        """
        sampled = self.sample(policy)
        text = measure_text(sampled.replies)
        scores = self.referee.score(self.prompts, sampled.replies)
        margin = tie_margin_of(self.referee, TIE_MARGIN, self.sft_referee)
        versus = compare(scores, self.sft_referee, margin, 500, clusters=self.clusters)
        metrics = {name: versus[name] for name in WIN_RATE_METRICS}
        metrics["kl"] = measure_drift(sampled, self.reference).kl
        metrics["length_ratio"] = text["length"] / max(self.sft_text["length"], 1e-9)
        metrics["repetition_increase"] = text["repetition"] - self.sft_text["repetition"]
        metrics |= {name: text[name] for name in TEXT_METRICS}
        if self.reward is not None:
            rewards = self.reward.score(self.prompts, sampled.replies)
            reward_gain = _standardised_gain(rewards, self.sft_reward)
            metrics["referee_gap"] = reward_gain - _standardised_gain(scores, self.sft_referee)
        return metrics


def _standardised_gain(scores: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the mean gain over the baseline, in the baseline's standard deviations."""
    spread = float(np.std(baseline))
    return (float(np.mean(scores)) - float(np.mean(baseline))) / (spread if spread > 0 else 1.0)
