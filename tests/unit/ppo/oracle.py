"""A slow and obvious PPO in float64 NumPy loops, written from docs/algorithms.md alone: rewards,
GAE, losses.

It shares no code with rlhf_core. Replies are lists of per-token rows, so there is no padding and no
mask here at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Switches:
    """The switches of one run, by the names of the parameters."""

    transform: str = "normalize"
    reward_clip: float | None = 2.0
    missing_eos_penalty: float = 0.0
    length_penalty: float = 0.0
    max_new_tokens: int = 8
    beta: float = 0.05
    placement: str = "reward"
    estimator: str = "k1"
    gamma: float = 1.0
    lam: float = 0.95
    advantage_estimator: str = "gae"
    replies_per_prompt: int = 1
    divide_by_std: bool = True
    normalize: bool = False
    advantage_clip: float | None = None
    kind: str = "clip"
    clip: float | None = 0.2
    dual_clip: float | None = None
    penalty: float = 0.1
    aggregation: str = "token"
    fixed_reference: bool = False
    correction_cap: float | None = None
    entropy: str = "off"
    entropy_weight: float = 0.0
    entropy_target: float = 0.0
    value_clip: float | None = 0.2


@dataclass
class Sequence:
    """One reply; every list has one entry per response token."""

    sampler: list[float]  # log-probabilities as the sampler rounded them
    old: list[float]  # log-probabilities of the policy that sampled
    ref: list[float]
    new: list[list[float]]  # log-distributions of the current policy
    ref_dist: list[list[float]]
    token: list[int]
    old_values: list[float]
    values: list[float]
    score: float
    finished: bool
    rewards: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)


def moments(history: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation of every finite score ever seen; 1 where it is undefined
    or zero.
    """
    finite = [x for x in history if math.isfinite(x)]
    mean = sum(finite) / len(finite)
    if len(finite) < 2:
        return mean, 1.0
    variance = sum((x - mean) ** 2 for x in finite) / (len(finite) - 1)
    return mean, math.sqrt(variance) if variance > 0 else 1.0


def rewards(batch: list[Sequence], history: list[float], s: Switches) -> None:
    """algorithms.md §4: moments with this batch, transform, clip, shaping, token rewards."""
    mean, std = moments(history + [q.score for q in batch])
    for q in batch:
        r = q.score
        if s.transform == "normalize":
            r = (r - mean) / std
        if s.transform == "scale":
            r = r / std
        if s.reward_clip is not None:
            r = max(-s.reward_clip, min(s.reward_clip, r))
        if not q.finished:
            r -= s.missing_eos_penalty
        r -= s.length_penalty * len(q.old) / s.max_new_tokens
        q.rewards = []
        for t in range(len(q.old)):
            penalty = -s.beta * (q.old[t] - q.ref[t]) if s.placement == "reward" else 0.0
            q.rewards.append(penalty + (r if t == len(q.old) - 1 else 0.0))


def advantages(batch: list[Sequence], s: Switches) -> None:
    """algorithms.md §5 by its definition: a sum over all later deltas, not a recursion; or a
    comparison in groups.
    """
    if s.advantage_estimator != "gae":
        for start in range(0, len(batch), s.replies_per_prompt):
            group_advantages(batch[start : start + s.replies_per_prompt], s)
        return
    for q in batch:
        n = len(q.old)
        deltas = [
            q.rewards[t] + s.gamma * (q.old_values[t + 1] if t + 1 < n else 0.0) - q.old_values[t]
            for t in range(n)
        ]
        q.advantages = [
            sum((s.gamma * s.lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)
        ]
        q.returns = [q.advantages[t] + q.old_values[t] for t in range(n)]


def group_advantages(group: list[Sequence], s: Switches) -> None:
    """algorithms.md §5, without a critic: every token of a reply gets the reply's advantage among
    its group.
    """
    totals = [sum(q.rewards) for q in group]
    mean = sum(totals) / len(totals)
    spread = math.sqrt(sum((total - mean) ** 2 for total in totals) / (len(totals) - 1))
    for i, q in enumerate(group):
        others = totals[:i] + totals[i + 1 :]
        if s.advantage_estimator == "rloo":
            advantage = totals[i] - sum(others) / len(others)
        else:
            advantage = (totals[i] - mean) / (spread + 1e-4 if s.divide_by_std else 1.0)
        q.advantages = [advantage for _ in q.rewards]


def treated_advantages(batch: list[Sequence], s: Switches) -> list[list[float]]:
    """Normalised over all response tokens, then clipped."""
    everything = np.array([a for q in batch for a in q.advantages])
    out = []
    for q in batch:
        row = list(q.advantages)
        if s.normalize:
            row = [(a - everything.mean()) / math.sqrt(everything.var() + 1e-8) for a in row]
        if s.advantage_clip is not None:
            row = [max(-s.advantage_clip, min(s.advantage_clip, a)) for a in row]
        out.append(row)
    return out


def combine(terms: list[list[float]], aggregation: str) -> float:
    """One number from per-token terms."""
    if aggregation == "token":
        return sum(sum(row) for row in terms) / sum(len(row) for row in terms)
    return sum(sum(row) / len(row) for row in terms) / len(terms)


def kl_term(q: Sequence, t: int, s: Switches) -> float:
    """KL of the current policy to the reference at one token."""
    if s.estimator == "full":
        return sum(math.exp(p) * (p - r) for p, r in zip(q.new[t], q.ref_dist[t], strict=True))
    d = q.new[t][q.token[t]] - q.ref[t]
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[s.estimator]


def policy_loss(batch: list[Sequence], s: Switches) -> float:
    """algorithms.md §6, the policy's side without ptx."""
    treated = treated_advantages(batch, s)
    terms = []
    for q, row in zip(batch, treated, strict=True):
        out = []
        for t, a in enumerate(row):
            behaviour = q.ref[t] if s.fixed_reference else q.old[t]
            rho = math.exp(q.new[t][q.token[t]] - behaviour)
            if s.kind == "penalty":
                loss = -rho * a + s.penalty * (rho - 1 - math.log(rho))
            else:
                objective = rho * a
                if s.clip is not None:
                    objective = min(objective, max(1 - s.clip, min(1 + s.clip, rho)) * a)
                if s.dual_clip is not None and a < 0:
                    objective = max(objective, s.dual_clip * a)
                loss = -objective
            if s.correction_cap is not None:
                loss *= min(math.exp(q.old[t] - q.sampler[t]), s.correction_cap)
            if s.placement == "loss":
                loss += s.beta * kl_term(q, t, s)
            out.append(loss)
        terms.append(out)
    total = combine(terms, s.aggregation)
    entropies = [[-sum(math.exp(p) * p for p in dist) for dist in q.new] for q in batch]
    mean_entropy = combine(entropies, "token")
    if s.entropy == "bonus":
        total -= s.entropy_weight * mean_entropy
    if s.entropy == "target":
        total += s.entropy_weight * abs(mean_entropy - s.entropy_target)
    return total


def value_loss(batch: list[Sequence], s: Switches) -> float:
    """algorithms.md §6, the critic's side."""
    terms = []
    for q in batch:
        row = []
        for v, old, target in zip(q.values, q.old_values, q.returns, strict=True):
            squares = [(v - target) ** 2]
            if s.value_clip is not None:
                squares.append((max(old - s.value_clip, min(old + s.value_clip, v)) - target) ** 2)
            row.append(0.5 * max(squares))
        terms.append(row)
    return combine(terms, s.aggregation)
