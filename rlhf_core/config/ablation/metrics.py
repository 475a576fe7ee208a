"""What an ablation measures and draws: the names that ablation.yaml may use, with label and scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """An end value of a run. ``ratio`` metrics are compared as factors, on a log scale, values below ``floor`` counting
    as ``floor``; ``share`` metrics lie in [0, 1]; ``plain`` ones are compared by their difference."""

    label: str
    kind: Literal["plain", "share", "ratio"] = "plain"
    floor: float = 0.01


@dataclass(frozen=True)
class Curve:
    """A figure of ``history/ppo.jsonl`` over the iterations."""

    label: str
    log: bool = False


METRICS = {
    "gold": Metric("gold score"),
    "gold_gain": Metric("gold − SFT's"),
    "gold_win_rate": Metric("win rate by gold", "share"),
    "reward_gain": Metric("reward − SFT's, SD"),
    "referee_gain": Metric("referee's score − SFT's, SD"),
    "referee_win_rate": Metric("win rate by the referee", "share"),
    "judge_gain": Metric("judge's score − SFT's, SD"),
    "judge_win_rate": Metric("win rate by the judge", "share"),
    "kl": Metric("KL, nats per sequence", "ratio", floor=0.05),
    "length": Metric("tokens per reply", "ratio"),
    "repetition": Metric("repeated trigrams", "share"),
    "missing_eos": Metric("missing end", "share"),
    "distinct_2": Metric("distinct bigrams", "share"),
    "perplexity_reference": Metric("perplexity under SFT", "ratio"),
    "perplexity": Metric("perplexity under itself", "ratio"),
    "entropy": Metric("entropy, nats per token"),
    "explained_variance_early": Metric("explained variance, first iterations"),
    "reward_jitter_early": Metric("jitter of the reward, first third"),
    "reward_jitter_late": Metric("jitter of the reward, last third"),
}

CURVES = {
    "reward_mean": Curve("reward (raw score)"),
    "reward_tail": Curve("reward: median - 5th percentile"),
    "win_rate": Curve("win rate by the referee"),
    "kl": Curve("KL, nats per sequence", log=True),
    "length": Curve("tokens per reply"),
    "repetition": Curve("repeated trigrams"),
    "missing_eos": Curve("missing end"),
    "distinct_2": Curve("distinct bigrams"),
    "perplexity": Curve("perplexity under itself"),
    "perplexity_reference": Curve("perplexity under SFT", log=True),
    "entropy": Curve("entropy, nats per token"),
    "explained_variance": Curve("explained variance"),
    "value_loss": Curve("value loss", log=True),
    "clip_fraction": Curve("share of clipped ratios"),
    "policy_grad_norm": Curve("gradient norm of the policy", log=True),
}
