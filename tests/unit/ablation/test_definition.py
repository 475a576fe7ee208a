"""ablation.yaml: complete, valid, and every variant changes exactly what it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.ablation.definition import METRICS, Ablation, Claim, check_recipes, load_ablation
from benchmarks.ablation.verdicts import (
    AblationRun,
    ClaimOutcome,
    RunResult,
    SeedTable,
    judge_claims,
)
from rlhf_core.config import yaml_text
from rlhf_core.config.loading import check_params
from rlhf_core.config.profiles import merge, overridden
from rlhf_core.errors import ConfigError
from rlhf_core.storage.files import flatten

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("kl", "reward-norm", "ptx", "critic-pretraining", "value-clip", "global-clip")
OTHERS = {
    "ppo-max", "vanilla", "vanilla-reward-scaling", "vanilla-advantage-clip-0.15", "vanilla-advantage-clip-0.8",
    "vanilla-reward-clip-0.3", "vanilla-reward-clip-0.8", "vanilla-kl-fixed-reference", "vanilla-fixed-reference",
    "max-kl-0.01", "max-kl-0.1", "max-kl-0.3", "vanilla-entropy-bonus", "vanilla-entropy-target",
    "max-surrogate-clip-0.05", "max-surrogate-clip-0.5", "vanilla-three-clips", "max-policy-from-base",
    "max-critic-from-sft", "max-lambda-0", "max-lambda-1",
}  # fmt: skip
SMALL = """
seeds: [1]
reference: a
switches:
  kl: {ppo.kl.coefficient: 0.0}
variants:
  - {name: a, about: x}
  - {name: b, about: x, base: a, drop: [kl]}
figures:
  - name: one
    title: t
    variants: [a, b]
    curves: [kl]
    ends: [gold]
    claims: [{says: s, expects: [{metric: gold, of: b, is: lower, than: a}]}]
"""


@pytest.fixture(scope="module")
def ablation() -> Ablation:
    return load_ablation(ROOT / "benchmarks" / "ablation" / "ablation.yaml")


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return dict(yaml_text.plain(yaml_text.read(ROOT / "params.yaml")))


def load(folder: Path, old: str = "", new: str = "") -> Ablation:
    assert old in SMALL
    path = folder / "ablation.yaml"
    path.write_text(SMALL.replace(old, new, 1) if old else SMALL)
    return load_ablation(path)


def effective(ablation: Ablation, recipe: dict[str, Any], name: str) -> dict[str, Any]:
    """Every parameter of a variant, defaults included."""
    document = overridden(overridden(recipe, ablation.common), ablation.overrides(name))
    return flatten(check_params(document).model_dump(mode="json"))


def test_every_variant_of_the_paper_is_there(ablation: Ablation) -> None:
    wanted = (
        OTHERS
        | {f"max-without-{part}" for part in PARTS}
        | {f"vanilla-with-{part}" for part in PARTS}
    )
    assert wanted <= set(ablation.names)
    assert len(ablation.seeds) >= 3


def test_every_figure_of_the_paper_is_there(ablation: Ablation) -> None:
    wanted = {f"fig{number:02d}" for number in (4, 6, 7, 8, 9, 14, 15, 16, 17)}
    assert wanted <= {figure.name for figure in ablation.figures}
    assert all(figure.claims for figure in ablation.figures)


def test_every_variant_is_in_some_figure_and_every_claim_is_about_variants_that_are_drawn(
    ablation: Ablation,
) -> None:
    drawn = {name for figure in ablation.figures for name in figure.variants}
    assert drawn == set(ablation.names)
    for figure in ablation.figures:
        used = {
            n
            for c in figure.claims
            for e in c.expects
            for n in (e.of, e.than)
            if isinstance(n, str)
        }
        assert used <= set(figure.variants), figure.name


@pytest.mark.parametrize("name", ["ablation.yaml", "methods.yaml"])
def test_a_variant_is_valid_and_differs_from_its_base_by_what_it_names(
    name: str, recipe: dict[str, Any]
) -> None:
    ablation = load_ablation(ROOT / "benchmarks" / "ablation" / name)
    check_recipes(ablation, recipe, {}, name)
    for variant in ablation.variants:
        if variant.base is None:
            assert ablation.overrides(variant.name) == {}
            continue
        base, own = (
            effective(ablation, recipe, variant.base),
            effective(ablation, recipe, variant.name),
        )
        changed = {path for path in base.keys() | own.keys() if base.get(path) != own.get(path)}
        switched = {path for s in (*variant.add, *variant.drop) for path in ablation.switches[s]}
        named = switched | set(variant.change)
        # A section that is set to null loses all its fields.
        found = {
            next((n for n in named if f"{path}.".startswith(f"{n}.")), path) for path in changed
        }
        assert found == named, variant.name


def test_variants_differ_from_one_another(ablation: Ablation, recipe: dict[str, Any]) -> None:
    seen = [effective(ablation, recipe, name) for name in ablation.names]
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_with_every_part_added_vanilla_is_ppo_max(ablation: Ablation) -> None:
    assert set(ablation.variant("vanilla").drop) == set(PARTS)
    for part in PARTS:
        assert set(ablation.dropped(f"vanilla-with-{part}")) == {*PARTS} - {part}
        assert ablation.dropped(f"max-without-{part}") == (part,)


def test_vanilla_without_our_own_penalty_is_the_vanilla_profile(
    ablation: Ablation, recipe: dict[str, Any]
) -> None:
    text = merge(
        (ROOT / "params.yaml").read_text(),
        [("v", (ROOT / "profiles" / "vanilla.yaml").read_text())],
    )
    profile = overridden(yaml_text.plain(yaml_text.parse(text, "v")), ablation.common)
    expected = effective(ablation, recipe, "vanilla-without-eos-penalty")
    assert flatten(check_params(profile).model_dump(mode="json")) == expected


def extremes(metric: str) -> tuple[float, float]:
    """Two values that the metric can have, far apart. Gold of the world is between -1.79 and about
    1.
    """
    kind = METRICS[metric].kind
    return (0.0, 1.0) if kind == "share" else (1.0, 20.0) if kind == "ratio" else (-1.0, 1.0)


def test_every_expectation_can_hold_and_can_fail_by_values_that_can_be_measured(
    ablation: Ablation,
) -> None:
    for expectation in (
        e for figure in ablation.figures for claim in figure.claims for e in claim.expects
    ):
        low, high = extremes(expectation.metric)
        found = set()
        for of, than in ((low, high), (high, low), (high, high)):
            values = {expectation.of: of} | (
                {expectation.than: than} if isinstance(expectation.than, str) else {}
            )
            runs = [AblationRun(name, seed, Path(), "done") for name in values for seed in (1, 2)]
            data = SeedTable(
                [RunResult(run, {expectation.metric: values[run.variant]}) for run in runs]
            )
            claim = Claim(says="s", expects=(expectation,))
            found |= {verdict.outcome for verdict in judge_claims([claim], data)}
        assert found == {ClaimOutcome.HOLDS, ClaimOutcome.FAILS}, expectation


def test_common_settings_leave_the_training_of_the_policy_alone_but_for_its_length(
    ablation: Ablation,
) -> None:
    watching = (
        "compute.",
        "gates.",
        "evaluate.",
        "ppo.health.",
        "ppo.selection.",
        "ppo.iterations",
    )
    assert all(path.startswith(watching) for path in ablation.common)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("base: a", "base: aa", "variant 'b': base 'aa' is no variant above it; did you mean 'a'?"),
        ("drop: [kl]", "drop: [kll]", "variant 'b': switch 'kll' is no switch; did you mean 'kl'?"),
        ("drop: [kl]", "add: [kl]", "variant 'b' adds 'kl', which its base has not dropped"),
        (
            "drop: [kl]",
            "drops: [kl]",
            "unknown parameter 'variants.1.drops'; did you mean 'variants.1.drop'?",
        ),
        ("name: b", "name: a", "variant 'a' is defined twice"),
        ("reference: a", "reference: c", "reference 'c' is no variant"),
        (
            "curves: [kl]",
            "curves: [kll]",
            "figure 'one': curve 'kll' is no curve; did you mean 'kl'?",
        ),
        (
            "ends: [gold]",
            "ends: [golds]",
            "figure 'one': metric 'golds' is no metric; did you mean 'gold'?",
        ),
        ("than: a", "than: c", "figure 'one': variant 'c' is no variant"),
        ("is: lower", "is: same", "'is: same' needs it"),
        ("is: lower", "is: same, within: -1", "'within' must be above 0"),
        ("metric: gold", "by: -0.5, metric: kl", "compared as a ratio"),
        ("seeds: [1]", "seeds: []", "parameter 'seeds'"),
    ],
)
def test_mistakes_are_told_with_the_nearest_name(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, old, new)
    assert message in str(caught.value) and "ablation.yaml" in str(caught.value)


def test_an_unknown_parameter_is_told_with_its_variant(tmp_path: Path) -> None:
    ablation = load(tmp_path, "drop: [kl]", "change: {ppo.kl.coeficient: 0.1}")
    with pytest.raises(ConfigError) as caught:
        check_recipes(ablation, {}, {}, "f.yaml")
    expected = "f.yaml: variant 'b': unknown parameter 'ppo.kl.coeficient'; did you mean 'ppo.kl.coefficient'?"
    assert str(caught.value) == expected
