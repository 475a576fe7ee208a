"""Probes of whether a reward model reads.

They count how often it scores a held-out reply above a copy that is worse for one known reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_core.config.gates import ABSENT, PROBES
from rlhf_core.data.batches import TokenisedPair, usable_pairs
from rlhf_core.data.clusters import clusters_of, design_effect, wilson_bounds
from rlhf_core.data.encoding import pad_id
from rlhf_core.data.schema import Preference
from rlhf_core.data.token_tables import TokenTable
from rlhf_core.models.heads import ScalarModel
from rlhf_core.training.reward.counterfactuals import (
    NEEDS,
    counterfactuals,
    drawn_rows,
    world_contrasts,
)
from rlhf_core.training.reward.evaluation import accuracy
from rlhf_core.training.reward.trainer import PairScores, score_pairs
from rlhf_core.training.rng import derive_seed

FEWEST_PAIRS = 30  # with fewer a rate of 0.5 is known to within 0.18 at best

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probes:
    """Counterfactual pairs of the kinds that a set of held-out pairs can show.

    Attributes:
        pairs: Those of all kinds; ``chosen`` is the reply that must score higher.
        kinds: The kind of each.
        clusters: The question of each, as a number.
        absent: By kind of which there are too few pairs, why.
    """

    pairs: Sequence[TokenisedPair]
    kinds: np.ndarray
    clusters: np.ndarray
    absent: dict[str, str]


def probes_of(
    rows: Sequence[Preference], tokenizer: PreTrainedTokenizerBase, max_tokens: int, seed: int
) -> Probes:
    """Make the probes of held-out pairs.

    Rows of the synthetic world get its own probes as well.

    Args:
        rows: The held-out pairs.
        tokenizer: That of the model.
        max_tokens: Of prompt and reply together; longer pairs are left out.
        seed: Models with the same seed and tokenizer are tried on the same pairs.
    """
    seed = derive_seed(seed, "probes")
    drawn = drawn_rows(rows, seed)
    made = counterfactuals(drawn, seed) | world_contrasts(drawn, seed)
    listed: list[str] = []
    pair_rows: list[Preference] = []
    for kind, rows_of_kind in made.items():
        listed += [kind] * len(rows_of_kind)
        pair_rows += rows_of_kind
    usable, _ = usable_pairs(TokenTable.of_rows(tokenizer, Preference.KIND, pair_rows), max_tokens)
    kept = usable.rows
    kinds = np.array(listed, dtype=object)[kept]
    absent = {}
    for kind in made:
        count = int((kinds == kind).sum())
        if count < FEWEST_PAIRS:
            what = (
                f"{NEEDS[kind]} within max_tokens {max_tokens}"
                if kind in PROBES
                else "are of this kind"
            )
            absent[kind] = (
                f"{count} of {len(drawn)} held-out replies {what}, and {FEWEST_PAIRS} are needed"
            )
    shown = ~np.isin(kinds, list(absent))
    return Probes(
        usable.of(kept[shown]),
        kinds[shown],
        clusters_of([pair_rows[row] for row in kept[shown]]),
        absent,
    )


def score_probes(
    model: ScalarModel, tokenizer: PreTrainedTokenizerBase, probes: Probes, name: str
) -> PairScores:
    """Return the rewards of both replies of each pair."""
    if not len(probes.pairs):
        return PairScores(np.zeros(0), np.zeros(0))
    return score_pairs(model, probes.pairs, pad_id(tokenizer), f"{name}, probing")


def probe_metrics(probes: Probes, scores: PairScores) -> dict[str, object]:
    """Return by kind how often a model scores the better reply higher.

    A tie counts as half a success.

    Returns:
        ``KIND``, its 95 % bounds ``KIND_low95`` and ``KIND_high95`` over questions (Wilson's, for
        as many pairs as these are worth; a tie fails for the lower and succeeds for the upper one),
        and the number ``KIND_pairs``. Under ``absent`` is why a kind has none of these.
    """
    metrics: dict[str, object] = {}
    for kind in dict.fromkeys(probes.kinds.tolist()):
        of_kind = probes.kinds == kind
        metrics |= rate_with_bounds(kind, scores.margins[of_kind], probes.clusters[of_kind])
    for kind, reason in probes.absent.items():
        logger.warning("probes.%s is left out: %s", kind, reason)
    if probes.absent:
        metrics[ABSENT] = probes.absent
    return metrics


def rate_with_bounds(kind: str, margins: np.ndarray, clusters: np.ndarray) -> dict[str, object]:
    """Return the share of positive margins (B,), its bounds and B, under names of ``kind``.

    Bounds are over ``clusters`` (B,).
    """
    above = (margins > 0).astype(float)
    not_below = (margins >= 0).astype(float)
    count = len(margins)
    low, _ = wilson_bounds(float(above.mean()), count / design_effect(above, clusters))
    _, high = wilson_bounds(float(not_below.mean()), count / design_effect(not_below, clusters))
    return {
        kind: accuracy(margins),
        f"{kind}_low95": low,
        f"{kind}_high95": high,
        f"{kind}_pairs": float(len(margins)),
    }
