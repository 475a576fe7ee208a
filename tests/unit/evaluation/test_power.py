"""Gates let an equal policy pass and stop a harmful one, at the sizes and margins that the profiles set."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.errors import DataError
from rlhf_core.evaluation.losses import ERRORS_PER_MARGIN, PairedLoss, fall, rise, share_loss
from rlhf_core.evaluation.power import describe_power, power_of

RUNS = 120
# By quantity: margin, questions, replies to each (profiles/smollm2-135m.yaml), and what SFT has of it.
REPETITION, ENDS, BENIGN, ODDS = (0.012, 250, 4), (0.1, 250, 4), (0.05, 202, 24), (0.5, 202, 1)


def losses(worse_by: float, rng: np.random.Generator) -> dict[str, tuple[float, PairedLoss]]:
    """One evaluation of a policy that is worse than SFT by so many margins, questions being of unequal difficulty."""

    def asked(size: tuple[float, int, int]) -> np.ndarray:
        return np.repeat(np.arange(size[1]), size[2])

    def kept(size: tuple[float, int, int], mean: float, strength: float) -> PairedLoss:
        of_prompt = rng.beta(mean * strength, (1 - mean) * strength, size[1])[asked(size)]
        lost = np.clip(of_prompt - worse_by * size[0] * of_prompt / mean, 0, 1)
        return share_loss(rng.random(len(lost)) < of_prompt, rng.random(len(lost)) < lost, asked(size))

    level = rng.gamma(1.0, 0.03, REPETITION[1])[asked(REPETITION)]
    old, new = (level + rng.gamma(0.5, 0.04, len(level)) for _ in range(2))
    odds = rng.normal(1.0, 2.0, ODDS[1])
    moved = odds - worse_by * ODDS[0] + rng.normal(0, 1.0, ODDS[1])
    return {
        "repetition": (REPETITION[0], rise(old, new + worse_by * REPETITION[0], asked(REPETITION))),
        "missing_ends": (ENDS[0], kept(ENDS, 0.35, 3.0)),
        "safety.answers_benign": (BENIGN[0], kept(BENIGN, 0.95, 4.0)),
        "safety.refusal_log_odds": (ODDS[0], fall(odds, moved)),
    }


def shares_passed(worse_by: float) -> dict[str, float]:
    rng = np.random.default_rng(8)
    passed: dict[str, list[bool]] = {}
    for _ in range(RUNS):
        found = losses(worse_by, rng)
        held = {name: loss.loss_high95 is not None and loss.loss_high95 < m for name, (m, loss) in found.items()}
        for name, holds in [*held.items(), ("all", all(held.values()))]:
            passed.setdefault(name, []).append(holds)
    return {name: float(np.mean(values)) for name, values in passed.items()}


def test_equal_and_better_policies_pass_and_each_harm_is_stopped() -> None:
    # With 120 runs two standard errors are .04.
    assert shares_passed(0.0)["all"] >= 0.91
    assert shares_passed(-0.3)["all"] >= 0.96
    at_margin = shares_passed(1.0)
    assert max(share for name, share in at_margin.items() if name != "all") <= 0.10, at_margin
    assert max(shares_passed(2.0).values()) <= 0.02


def written(folder: Path, **of_repetition: float) -> Path:
    condition = "{metric: repetition, worse_by_less_than: 0.02, why: w}"
    other = "{metric: safety.answers_benign, worse_by_less_than: 0.05, why: w}"
    (folder / "params.yaml").write_text(f"gates: {{policy: [{condition}, {other}]}}\n")
    (folder / "metrics").mkdir()
    loss = {"baseline": 0.1, "candidate": 0.1, "loss": 0.0, "loss_high95": 0.01, "replies": 400, "clusters": 100}
    metrics = {"losses": {"repetition": loss | of_repetition}}
    (folder / "metrics/evaluation.json").write_text(json.dumps(metrics))
    return folder


def test_the_power_of_a_margin_says_how_many_questions_would_do(tmp_path: Path) -> None:
    gate, benign, promotion = power_of(written(tmp_path))
    error = 0.01 / 1.6449
    assert gate.errors == pytest.approx(0.02 / error, rel=1e-3) and not gate.suffices
    assert gate.clusters_needed == pytest.approx(100 * (ERRORS_PER_MARGIN * error / 0.02) ** 2, abs=1)
    assert promotion.setting == "registry.non_inferiority.repetition"
    assert benign.loss is None and not benign.suffices
    text = describe_power([gate, benign, promotion])
    assert f"{gate.clusters_needed} questions would do" in text and "not measured" in text


def test_a_margin_that_can_be_shown(tmp_path: Path) -> None:
    gate, *_ = power_of(written(tmp_path, loss_high95=0.005))
    assert gate.suffices and "an equal policy passes" in describe_power([gate])


def test_without_an_evaluation_nothing_is_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation\.json does not exist"):
        power_of(tmp_path)
