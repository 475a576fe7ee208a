"""How often placebos and better policies pass at equal lengths:
``python -m benchmarks.length_control [--runs 100]``.

Replies are simulated: a length, and how good a judge finds the content. 320 questions have four
replies of each model; questions differ in how long and how good replies to them are. Every
candidate gets the same outcomes and the same resampled questions, and passes where its lower 95 %
bound is at least one half.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhf_core.evaluation.comparisons.comparison import (
    length_controlled_win_rate,
    outcomes,
    rates_at_equal_length,
)
from rlhf_core.evaluation.statistics import percentile, resample_weights

QUESTIONS, REPLIES, RESAMPLES = 320, 4, 100
CHARACTERS = (
    28.0  # the standard deviation of lengths, in which the judge's liking for length is given
)


@dataclass(frozen=True)
class Policy:
    """A policy, and the judge that compares it with SFT.

    Attributes:
        liking: Standard deviations of content that 28 characters are worth to the judge; None: it
            sees length alone.
        unchanged: Share of the replies that are SFT's own, before anything is appended.
        gain: How much better the other replies are, in standard deviations of content.
        grows: By how many characters the other replies are longer.
        appended: Characters of the texts of which one is appended.
        share: Share of the replies that it is appended to.
    """

    liking: float | None
    unchanged: float
    gain: float = 0.0
    grows: float = 0.0
    appended: tuple[int, ...] = ()
    share: float = 1.0

    def compared(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw outcomes and length differences, (questions, replies) each."""
        size = (QUESTIONS, REPLIES)
        usual, quality = rng.normal(4.15, 0.3, QUESTIONS), rng.normal(0, 0.5, QUESTIONS)
        gain = self.gain + (rng.normal(0, 0.4, QUESTIONS) if self.gain else 0.0)
        length, fresh_length = (
            np.exp(rng.normal(usual[:, np.newaxis], 0.35, size)).round() for _ in range(2)
        )
        content, fresh_content = (rng.normal(quality[:, np.newaxis], 1.0, size) for _ in range(2))
        same = rng.random(size) < self.unchanged
        new_length = np.where(same, length, np.round(fresh_length + self.grows))
        new_content = np.where(same, content, fresh_content + np.reshape(gain, (-1, 1)))
        if self.appended:
            new_length = new_length + np.where(
                rng.random(size) < self.share, rng.choice(self.appended, size), 0
            )
        old, new = length, new_length
        if self.liking is not None:
            old = content + self.liking * length / CHARACTERS
            new = new_content + self.liking * new_length / CHARACTERS
        return outcomes(new - old, 0.05 * float(old.std())), new_length - length


POLICIES = {
    "closer on all, judge sees length alone": Policy(None, unchanged=1.0, appended=(18,)),
    "closer on 70 %, length alone": Policy(None, unchanged=1.0, appended=(18,), share=0.7),
    "one of three closers on all": Policy(1.0, unchanged=1.0, appended=(17, 18, 20)),
    "closer on half": Policy(1.0, unchanged=1.0, appended=(18,), share=0.5),
    "closer on all, 30 % unchanged, length alone": Policy(None, unchanged=0.3, appended=(18,)),
    "closer on all, 30 % unchanged": Policy(1.0, unchanged=0.3, appended=(18,)),
    "closer on all, drawn again": Policy(1.0, unchanged=0.0, appended=(18,)),
    "opener and closer, drawn again, length alone": Policy(None, unchanged=0.0, appended=(36,)),
    "SFT drawn again": Policy(1.0, unchanged=0.0),
    "better by 0.3, as long": Policy(0.3, unchanged=0.2, gain=0.3),
    "better by 0.3, longer by 10": Policy(1.0, unchanged=0.2, gain=0.3, grows=10),
    "better by 0.5, longer by 20": Policy(1.0, unchanged=0.2, gain=0.5, grows=20),
}
Rates = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _regression(won: np.ndarray, longer: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The paper's regression on all pairs."""
    spread = float(longer.std()) or 1.0
    return rates_at_equal_length(won, np.tanh(longer / spread), weights)


def _without_penalty(won: np.ndarray, longer: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The same with a thousandth of the penalty: a feature that is larger by 32 needs a smaller
    slope.
    """
    spread = float(longer.std()) or 1.0
    return rates_at_equal_length(won, 32 * np.tanh(longer / spread), weights)


def _nearly_equal(won: np.ndarray, longer: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """A local line through pairs whose lengths differ by less than a standard deviation."""
    width = float(np.sqrt((longer**2).mean())) or 1.0
    kernel = weights * np.maximum(0.0, 1 - np.abs(longer) / width)
    total, first, second = kernel.sum(axis=1), kernel @ longer, kernel @ longer**2
    determinant = total * second - first**2
    known = determinant > 1e-9
    line = (second * (kernel @ won) - first * (kernel @ (longer * won))) / np.where(
        known, determinant, 1.0
    )
    return np.where(known, line, 0.0)


CANDIDATES: dict[str, Rates] = {
    "regression": _regression,
    "without penalty": _without_penalty,
    "nearly equal": _nearly_equal,
}


def main() -> None:
    """Print the mean rate of each candidate and the share of the evaluations that pass."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.length_control", description=__doc__
    )
    parser.add_argument("--runs", type=int, default=100, help="evaluations of each policy")
    runs = parser.parse_args().runs
    print(
        "| policy | win rate | "
        + " | ".join(CANDIDATES)
        + " | weighted (shipped) | share of pairs |"
    )
    print("|---|---|" + "---|" * (len(CANDIDATES) + 2))
    for name, policy in POLICIES.items():
        plain, share, rates, passed = _measured(policy, runs)
        cells = [f"{np.mean(rates[key]):.3f}; {np.mean(passed[key]):.0%}" for key in rates]
        print(f"| {name} | {plain:.3f} | {' | '.join(cells)} | {share:.2f} |", flush=True)


def _measured(
    policy: Policy, runs: int
) -> tuple[float, float, dict[str, list[float]], dict[str, list[bool]]]:
    """Mean win rate, mean share of pairs that count, and by candidate the rates and whether each
    passed.
    """
    rates: dict[str, list[float]] = {name: [] for name in (*CANDIDATES, "weighted")}
    passed: dict[str, list[bool]] = {name: [] for name in rates}
    plain, shares = [], []
    for seed in range(runs):
        outcome, longer_by = policy.compared(np.random.default_rng(seed))
        won, longer = outcome.ravel(), longer_by.ravel()
        drawn = np.concatenate(list(resample_weights(QUESTIONS, RESAMPLES, seed)))
        for name, candidate in CANDIDATES.items():
            rates[name].append(float(candidate(won, longer, np.ones((1, len(won))))[0]))
            resampled = candidate(won, longer, np.repeat(drawn, REPLIES, axis=1))
            passed[name].append(float(percentile(resampled, 0.025, QUESTIONS)) >= 0.5)
        shipped = length_controlled_win_rate(outcome, longer_by, RESAMPLES, seed)
        rates["weighted"].append(shipped["lc_win_rate"])
        passed["weighted"].append(shipped["lc_win_rate_low95"] >= 0.5)
        plain.append(float(won.mean()))
        shares.append(shipped["lc_share"])
    return float(np.mean(plain)), float(np.mean(shares)), rates, passed


if __name__ == "__main__":
    main()
