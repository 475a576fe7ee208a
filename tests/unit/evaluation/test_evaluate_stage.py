"""The evaluate stage and a match on tiny models: the files a user finds, the numbers in them, and
who judges.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architecture.glossary import undocumented
from clean_files import write_rows
from traced import missed

import rlhf_core as rlhf
from rlhf_core.config.evaluation import (
    EvaluateConfig,
    EvaluateStageConfig,
    HeldOutPerplexityConfig,
    MultipleChoiceConfig,
    OpponentConfig,
    SafetyConfig,
    VerifiableConfig,
)
from rlhf_core.config.gates import Condition
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data import template_process
from rlhf_core.data.schema import Message, Preference, PretrainText, Prompt, read_table
from rlhf_core.data.statistics import cluster_codes
from rlhf_core.data.text import trigram_repetition
from rlhf_core.errors import DataError, ModelError, RlhfError
from rlhf_core.evaluation import match
from rlhf_core.evaluation.comparisons import policy_vs_sft
from rlhf_core.evaluation.comparisons.comparison import compare
from rlhf_core.evaluation.comparisons.policy_vs_sft import Evaluation
from rlhf_core.evaluation.fixed_sets import EvaluatedModel, FixedSets
from rlhf_core.evaluation.losses import PairedLoss, growth, rise, share_loss
from rlhf_core.evaluation.match import run_match
from rlhf_core.evaluation.perplexity import held_out_perplexities, score_held_out
from rlhf_core.evaluation.regression import REFUSAL_CHECKS
from rlhf_core.evaluation.replies import Reply
from rlhf_core.gates import check
from rlhf_core.models.causal_lm import load_policy, load_tokenizer
from rlhf_core.sampling.sampler import LocalSampler
from rlhf_core.stages import evaluate
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.storage.files import sha256_tree
from rlhf_core.training.run_context import RunContext
from rlhf_extras.annotation.human_pairs import TRAINING_PROMPTS, sampled_candidates

from .conftest import made_prompt, sums

SHORT = SamplingConfig(max_new_tokens=5)
CONFIG = EvaluateStageConfig(
    prompts=12, kl_samples=4, max_new_tokens=5, bootstrap=50, sampling=SHORT
)
PAIR = Preference(
    "1", [Message("user", "is it red?")], "yes, it is.", "no", None, "fact", "world", "g"
)
TEXT = PretrainText("1", "the boat is red.", "fact", "world", "g")
Measured = tuple[dict[str, Any], Paths]  # metrics, and where the files are


def run_stage(
    root: Path, models: Path, rows: list[Prompt], config: EvaluateStageConfig = CONFIG
) -> Measured:
    write_rows(root / "data/clean/prompts/test.parquet", rows)
    write_rows(root / "data/clean/preferences/test.parquet", [PAIR])
    write_rows(root / "data/clean/pretrain/validation.parquet", [TEXT])
    inputs = {key: models / Path(path).name for key, path in evaluate.STAGE.inputs.items()}
    outputs = Paths({key: root / path for key, path in evaluate.STAGE.outputs.items()})
    inputs["clean"] = root / "data/clean"
    evaluate.STAGE.run(config, Paths(inputs), outputs, RunContext(root / "work", folder=root))
    return json.loads(outputs.metrics.read_text()), outputs


def finite(values: dict[str, Any]) -> bool:
    return all(finite(v) if isinstance(v, dict) else math.isfinite(v) for v in values.values())


@pytest.fixture(scope="module")
def plain(
    tmp_path_factory: pytest.TempPathFactory, models: Path, prompts: list[Prompt]
) -> Measured:
    """The stage on prompts of the world with nothing beside the comparison."""
    return run_stage(tmp_path_factory.mktemp("plain"), models, prompts)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_null_beside_the_others(
    tmp_path: Path,
    models: Path,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    value: float,
) -> None:
    monkeypatch.setattr(policy_vs_sft, "held_out_perplexities", lambda *_: {"preferred": value})
    metrics, _ = run_stage(tmp_path, models, prompts)
    assert (
        metrics["sft"].pop("perplexity_preferred")
        is metrics["policy"].pop("perplexity_preferred")
        is None
    )
    assert finite(metrics)


def test_world_prompts_are_judged_by_all(
    plain: Measured, models: Path, prompts: list[Prompt]
) -> None:
    metrics, outputs = plain
    judges = {"gold", "reward", "referee", "judge"}
    keys = judges | {"length", "repetition", "missing_eos", "perplexity_reference", "distinct_2"}
    assert keys <= metrics["sft"].keys() and keys <= metrics["policy"].keys()
    assert set(metrics["comparison"]) == judges and finite(metrics)
    assert metrics["agreement"]["judge_pairs"] == 2.0
    assert metrics["agreement"]["judge_share"] == 0.5
    gold = metrics["comparison"]["gold"]
    assert gold["prompts"] == metrics["prompts"] == min(12, len(prompts))
    assert gold["win"] + gold["tie"] / 2 == pytest.approx(gold["win_rate"])
    assert all(
        0 <= c["lc_win_rate_low95"] <= c["lc_win_rate_high95"] <= 1
        for c in metrics["comparison"].values()
    )
    assert gold["mean_difference"] == pytest.approx(
        metrics["policy"]["gold"] - metrics["sft"]["gold"]
    )
    rows = read_table(outputs.comparisons).to_pylist()
    assert len({row["id"] for row in rows}) == gold["prompts"]
    assert sum(row["policy_gold"] for row in rows) / len(rows) == pytest.approx(
        metrics["policy"]["gold"]
    )
    assert "refuses_harmful" in metrics["regression"] and "safety" not in metrics["policy"]
    assert sum(c["prompts"] for c in metrics["category"].values()) == gold["prompts"]
    for name in ("sft", "policy"):
        scored = score_held_out(*load_policy(models / name), ([PAIR], [TEXT]), CONFIG.perplexity)
        expected = held_out_perplexities(scored)
        assert {
            kind: metrics[name][f"perplexity_{kind}"] for kind in ("preferred", "pretrain")
        } == expected
    assert metrics["sft"]["perplexity_preferred"] != metrics["policy"]["perplexity_preferred"]


def test_other_prompts_have_no_gold_judge_and_safety_may_be_asked_more_often(
    tmp_path: Path, models: Path
) -> None:
    rows = sums(6)
    settings = {
        "safety": SafetyConfig(prompts=1, replies_per_prompt=4),
        "perplexity": HeldOutPerplexityConfig(rows=0),
    }
    metrics, outputs = run_stage(tmp_path, models, rows, CONFIG.model_copy(update=settings))
    cases = [json.loads(line) for line in outputs.bad_cases.read_text().splitlines()]
    assert {case["judge"] for case in cases} <= {"judge"}, (
        "the best judge without gold is the one that chose nothing"
    )
    assert (
        set(metrics["comparison"]) == {"reward", "referee", "judge"}
        and "gold" not in metrics["policy"]
    )
    assert "refuses_harmful" not in metrics["regression"]
    for side in ("sft", "policy"):
        assert set(metrics[side]["safety"]) == {"refuses_harmful", "answers_benign"}
        assert all(4 * share == int(4 * share) for share in metrics[side]["safety"].values()), (
            "shares of four replies"
        )
        assert not {"perplexity_preferred", "perplexity_pretrain"} & metrics[side].keys()


def test_a_prompt_that_the_world_no_longer_knows_stops_the_stage(
    tmp_path: Path, models: Path
) -> None:
    with pytest.raises(DataError, match="run the collect stage again"):
        run_stage(tmp_path, models, [made_prompt("what is one and one?", "sums")])


def test_the_same_inputs_give_equal_bytes(
    plain: Measured, tmp_path: Path, models: Path, prompts: list[Prompt]
) -> None:
    outputs = [plain[1], run_stage(tmp_path, models, prompts)[1]]
    first, again = ([path.read_bytes() for path in files.values()] for files in outputs)
    assert first == again


def test_batches_bound_memory_no_numbers(
    plain: Measured, tmp_path: Path, models: Path, prompts: list[Prompt]
) -> None:
    whole, (few, _) = (
        plain[0],
        run_stage(tmp_path, models, prompts, CONFIG.model_copy(update={"batch_size": 3})),
    )
    for part in ("sft", "policy"):
        assert few[part] == pytest.approx(whole[part], rel=1e-4, abs=1e-6)
    assert few["comparison"]["gold"] == pytest.approx(whole["comparison"]["gold"])
    assert few["kl"] == pytest.approx(whole["kl"], rel=1e-4, abs=1e-6)


def test_kl_is_of_the_distribution_of_ppo(
    plain: Measured, tmp_path: Path, models: Path, prompts: list[Prompt]
) -> None:
    sharp = CONFIG.model_copy(update={"ppo": PpoConfig(temperature=0.05, min_new_tokens=3)})
    whole, (sharper, _) = plain[0], run_stage(tmp_path, models, prompts, sharp)
    assert sharper["kl"] != whole["kl"]
    assert sharper["sft"]["perplexity_reference"] < whole["sft"]["perplexity_reference"]
    assert sharper["comparison"] == whole["comparison"], (
        "judged replies keep the evaluation's own sampling"
    )


def test_a_prompt_may_get_several_replies(
    plain: Measured, tmp_path: Path, models: Path, prompts: list[Prompt]
) -> None:
    once, first = plain[0], read_table(plain[1].comparisons).to_pylist()
    update = {"replies_per_prompt": 3, "best_of_n": 2}
    thrice, outputs = run_stage(tmp_path, models, prompts, CONFIG.model_copy(update=update))
    rows = read_table(outputs.comparisons).to_pylist()
    assert [row["id"] for row in rows] == [row["id"] for row in first for _ in range(3)]
    assert [row["policy_reply"] for row in rows[::3]] == [row["policy_reply"] for row in first]
    assert any(
        rows[i]["policy_reply"] != rows[i + 1]["policy_reply"] for i in range(0, len(rows), 3)
    )
    assert thrice["prompts"] == once["prompts"] == thrice["comparison"]["judge"]["prompts"]
    assert sum(c["prompts"] for c in thrice["category"].values()) == once["prompts"]
    margin = thrice["comparison"]["judge"]["tie_margin"]
    gains = [row["policy_judge"] - row["sft_judge"] for row in rows]
    shares = [0.5 if abs(gain) <= margin else float(gain > 0) for gain in gains]
    assert thrice["comparison"]["judge"]["win_rate"] == pytest.approx(sum(shares) / len(shares))
    assert [row["best_of_n_reply"] is None for row in rows[:3]] == [False, True, True]


def test_best_of_n_changes_nothing_else(
    plain: Measured, tmp_path: Path, models: Path, prompts: list[Prompt]
) -> None:
    metrics, outputs = run_stage(
        tmp_path, models, prompts, CONFIG.model_copy(update={"best_of_n": 4})
    )
    best = metrics.pop("best_of_n")
    assert metrics == plain[0] and best["n"] == 4
    # The best of four by the reward model beats one reply of the same model by that judge.
    assert (
        best["reward"] > metrics["sft"]["reward"] and best["comparison"]["reward"]["win_rate"] > 0.5
    )
    assert (
        set(best["comparison"])
        == set(best["policy_comparison"])
        == {"reward", "referee", "judge", "gold"}
    )
    gained = best["policy_comparison"]["gold"]["mean_difference"]
    assert gained == pytest.approx(metrics["policy"]["gold"] - best["gold"])
    assert best["length"] < best["sampled_tokens_per_reply"] <= 4 * CONFIG.sampling.max_new_tokens
    assert undocumented("metrics/evaluation.json", [best]) == set()
    rows = read_table(outputs.comparisons).to_pylist()
    assert sum(row["best_of_n_gold"] for row in rows) / len(rows) == pytest.approx(best["gold"])


def jsonl(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_is_measured_beside_changes_no_other_number_and_gates_can_use_it(
    tmp_path: Path, models: Path
) -> None:
    """Verifiable prompts, multiple choice, groups of prompts, and a third party that replied to two
    of four prompts.
    """
    rows = [
        made_prompt(f"what is {i} and {i}?", "fact" if i % 2 else "harmful", "a file")
        for i in range(4)
    ]
    easy = {"prompt": "is it red?", "require": {"min_characters": 1}, "category": "easy"}
    hard = {
        "prompt": "is it blue?",
        "require": {"equals": "no model says this"},
        "category": "hard",
    }
    jsonl(tmp_path / "met/checks.jsonl", easy, hard)
    replies = [
        {"prompt": row.prompt[-1].content, "reply": f"reply to {row.id}"}
        for row in (rows[0], rows[3])
    ]
    jsonl(tmp_path / "met/replies.jsonl", *replies)
    questions = {
        "things": "1,which is a colour?,red,seven,under,slowly,A",
        "城市": "0,首都?,上,广,北,深,C",
    }
    for name, question in questions.items():
        (tmp_path / f"met/{name}_val.csv").write_text(
            f"id,question,A,B,C,D,answer\n{question}\n", encoding="utf-8"
        )
    settings = {
        "verifiable": VerifiableConfig(path="checks.jsonl"),
        "multiple_choice": MultipleChoiceConfig(files=("*_val.csv",)),
        "opponents": (OpponentConfig(name="other", path="replies.jsonl"),),
    }
    few = CONFIG.model_copy(update={"safety": SafetyConfig(prompts=0)})
    plain, _ = run_stage(tmp_path / "plain", models, rows, few)
    metrics, outputs = run_stage(tmp_path / "met", models, rows, few.model_copy(update=settings))
    for metric, bound in (
        ("verifiable.policy.passed", {"at_least_of": "verifiable.sft.passed", "slack": 1.0}),
        (
            "policy.multiple_choice.accuracy",
            {"at_least_of": "sft.multiple_choice.accuracy", "slack": 1.0},
        ),
        ("group.harmless.judge.win_rate", {"at_least": 0.0}),
    ):
        assert check(
            Condition.model_validate({"metric": metric, "why": "kept"} | bound), metrics
        ).passed
    checked, met, answered = (
        metrics.pop(name) for name in ("verifiable", "opponents", "multiple_choice")
    )
    sides = [metrics[name].pop("multiple_choice")["accuracy"] for name in ("policy", "sft")]
    assert metrics["losses"].pop("verifiable.passed")["replies"] == 2
    assert metrics == plain

    assert checked["prompts"] == 2 and checked["policy"]["category"]["hard"] == 0.0
    stored = [
        json.loads(line)
        for line in (tmp_path / "met/.rlhf/verifiable.jsonl").read_text().splitlines()
    ]
    assert stored[1]["sft_lacks"] == ["equals"]

    assert set(answered["subject"]) == {"things", "城市"} and answered["questions"] == 2
    assert answered["difference"] == pytest.approx(sides[0] - sides[1])
    stored = [
        json.loads(line)
        for line in (tmp_path / "met/.rlhf/multiple_choice.jsonl").read_text().splitlines()
    ]
    assert sum(row["policy"] == row["answer"] for row in stored) / 2 == pytest.approx(sides[0])

    met = met["other"]
    assert (met["prompts"], met["missing"], met["unused"]) == (2, 2, 0)
    assert (
        set(met["policy"]["comparison"])
        == set(met["sft"]["comparison"])
        == {"reward", "referee", "judge"}
    )
    groups = plain["group"]
    assert {name: by_judge["judge"]["prompts"] for name, by_judge in groups.items()} == {
        "helpful": 2,
        "harmless": 2,
    }
    assert set(met["policy"]["group"]) == set(groups)
    whole = plain["comparison"]["judge"]["win_rate"]
    assert sum(groups[name]["judge"]["win_rate"] for name in groups) / 2 == pytest.approx(whole)
    compared = read_table(outputs.comparisons).to_pylist()
    assert [row["opponent_other_reply"] is not None for row in compared].count(True) == 2
    assert all(
        (row["opponent_other_reply"] is None) == (row["opponent_other_judge"] is None)
        for row in compared
    )


def test_questions_that_no_model_has_room_for_are_refused_before_replies_are_sampled(
    tmp_path: Path, models: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {
        "question": "why? " * 300,
        "A": "red",
        "B": "seven",
        "C": "under",
        "D": "slowly",
        "answer": "A",
    }
    jsonl(tmp_path / "things_val.jsonl", question)
    monkeypatch.setattr(evaluate, "sample_sets", pytest.fail)
    asked = {"multiple_choice": MultipleChoiceConfig(files=("things_val.jsonl",))}
    with pytest.raises(DataError, match="every multiple-choice question is longer"):
        run_stage(tmp_path, models, prompts, CONFIG.model_copy(update=asked))


def test_bad_cases_are_where_reward_and_judge_disagree() -> None:
    rows = [made_prompt(str(i), "c") for i in range(5)]
    sets, replies = FixedSets(rows, [], []), [Reply("x", True)] * 5
    sft = EvaluatedModel(replies, scores={"reward": [0.0] * 5, "referee": [0.0] * 5})
    # The last difference of the referee is within its tie margin.
    scores = {"reward": [1.0, 3.0, -1.0, 2.0, 4.0], "referee": [-1.0, -2.0, -3.0, 1.0, -0.04]}
    policy = EvaluatedModel(replies, scores=scores)
    evaluation = Evaluation(sets, sft, policy, CONFIG)
    evaluation.comparison["referee"] = compare(
        policy.scores["referee"], sft.scores["referee"], 0.05
    )
    cases = evaluation.bad_cases("referee")
    assert [case["prompt"] for case in cases] == ["user: 1", "user: 0"]
    assert cases[0]["disagreement"] > cases[1]["disagreement"] > 0


@pytest.mark.slow
def test_what_the_stage_executes_counts_in_its_fingerprint(
    tmp_path: Path, models: Path, prompts: list[Prompt]
) -> None:
    assert missed("evaluate", lambda: run_stage(tmp_path, models, prompts[:4])) == set()


SAMPLED = "{max_new_tokens: 5, repetition_penalty: 1.0}"
SETTINGS = (
    f"prompts: 4, bootstrap: 50, max_new_tokens: 5, sampling: {SAMPLED}, safety: {{prompts: 3}}"
)


def workspace(folder: Path, models: Path, more: str = "") -> Path:
    """A folder with what a match reads, and four prompts to test and to train on."""
    shutil.copytree(models, folder / "models")
    (folder / "params.yaml").write_text(f"seed: 1\nevaluate: {{{SETTINGS}{more}}}\n")
    for path in (Path("data/clean/prompts/test.parquet"), TRAINING_PROMPTS):
        write_rows(folder / path, sums(4))
    return folder


def test_the_model_that_selected_nothing_judges_all_replies(tmp_path: Path, models: Path) -> None:
    root = workspace(tmp_path, models, ", replies_per_prompt: 3, verifiable: {path: checks.jsonl}")
    jsonl(
        root / "checks.jsonl",
        {"prompt": "one", "require": {"finished": True}}, {"prompt": "two", "require": {"min_words": 999}},
    )  # fmt: skip
    result = run_match(root, models / "sft", models / "policy")
    assert set(result["comparison"]) == {"judge"} and result["comparison"]["judge"]["prompts"] == 4
    assert {
        name: (loss["replies"], loss["clusters"]) for name, loss in result["losses"].items()
    } == {
        **dict.fromkeys(
            ("missing_ends", "repetition", "length", "regression.passed", "category.sums"), (12, 4)
        ),
        **dict.fromkeys(
            [f"safety.{n}" for n in ("refuses_harmful", "answers_benign", "refusal_log_odds")],
            (3, 3),
        ),
        "verifiable.passed": (2, 2),
    }
    assert result["losses"]["safety.refusal_log_odds"]["baseline"] != 0.0
    assert result["content"]["judge"] == sha256_tree(models / "judge")
    checked = result["losses"]["verifiable.passed"]
    assert (
        checked["loss"] == pytest.approx(checked["baseline"] - checked["candidate"])
        and checked["baseline"] <= 0.5
    )
    with pytest.raises(DataError, match="4 test prompts make 1 sets"):
        run_match(root, models / "sft", models / "policy", prompt_set=1)


@pytest.mark.parametrize("side", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_either_model_has_limits(
    side: int, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "SECONDS", 1)
    root = workspace(tmp_path, models)
    folders = [models / "sft", models / "policy"]
    folders[side] = tmp_path / "other"
    shutil.copytree(models / "sft", folders[side])
    loop = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    (folders[side] / "chat_template.jinja").write_text(loop)
    with pytest.raises(ModelError, match="the chat template takes more than 1 s"):
        run_match(root, *folders)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("other", ["absent", "a reward model"])
def test_a_match_looks_at_both_folders_before_it_samples(
    side: int, other: str, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(*_: object) -> None:
        pytest.fail("it has sampled")

    monkeypatch.setattr(match, "sampled_model", sample)
    root = workspace(tmp_path, models)
    folders = [models / "sft", models / "policy"]
    folders[side] = tmp_path / "nowhere" if other == "absent" else models / "judge"
    with pytest.raises(ModelError):
        run_match(root, *folders)


WITHOUT_VLLM = {"kind": "vllm", "python": sys.executable}


def pretrain_critic(folder: Path, models: Path) -> None:
    rlhf.train_critic(
        models / "sft", load_tokenizer(models / "sft"), ["is it red?"], lambda prompts, replies: [0.0 for _ in replies],
        rollout=rlhf.RolloutConfig.model_validate({"max_new_tokens": 5, "sampler": WITHOUT_VLLM}),
    )  # fmt: skip


def select(folder: Path, models: Path) -> None:
    """The first to sample in PPO with a referee, before any rollout."""
    settings = {
        "importance_sampling_correction": {"mode": "always"},
        "sampler": WITHOUT_VLLM,
        "ptx": {"weight": 0.0},
    }
    without_critic = {
        "advantage": {"estimator": "rloo"},
        "replies_per_prompt": 2,
        "critic_optimizer": None,
    }
    config = rlhf.PpoConfig.model_validate({"max_new_tokens": 5} | settings | without_critic)
    rlhf.train_ppo(
        models / "sft", load_tokenizer(models / "sft"), ["is it red?"], lambda prompts, replies: [0.0 for _ in replies],
        referee=models / "referee", validation_prompts=["is it blue?"], config=config,
    )  # fmt: skip


def evaluate_stage(folder: Path, models: Path) -> None:
    settings = {"prompts": 4, "sampling": {"repetition_penalty": 1.0}, "sampler": WITHOUT_VLLM}
    config = EvaluateStageConfig.model_validate(settings)
    run_stage(folder, models, [made_prompt("is it red?", "fact", "a file")], config)


def with_sampler(folder: Path, models: Path) -> Path:
    return workspace(folder, models, f", sampler: {WITHOUT_VLLM}")


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "critic pre-training": pretrain_critic,
    "selection": select,
    "evaluation": evaluate_stage,
    "match": lambda folder, models: run_match(
        with_sampler(folder, models), models / "sft", models / "policy"
    ),
    "annotation": lambda folder, models: sampled_candidates(with_sampler(folder, models), 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_whatever_samples_takes_the_sampler_of_its_settings(
    name: str, tmp_path: Path, models: Path
) -> None:
    """This Python has no vLLM, so that each ends with what the server says."""
    with pytest.raises(
        RlhfError, match=r"vLLM's server ended with status 1; .*No module named"
    ) as raised:
        CALLS[name](tmp_path, models)
    assert "\n" not in str(raised.value)


def test_a_sampler_lets_go_of_its_model(models: Path) -> None:
    sampler, model = LocalSampler(), load_policy(models / "sft")[0]
    sampler.sync(model, 0)
    kept = weakref.ref(model)
    del model
    sampler.release()
    gc.collect()
    assert kept() is None
    with pytest.raises(RlhfError, match="no weights"), sampler.awake(0, 1, 1):
        raise AssertionError("it woke up")


def test_a_repetition_penalty_that_the_server_counts_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"repetition_penalty to 1\.0, or sampler\.kind to local"):
        EvaluateConfig.model_validate(
            {"sampler": WITHOUT_VLLM, "sampling": {"repetition_penalty": 1.1}}
        )
    EvaluateConfig(sampling=SamplingConfig(repetition_penalty=1.0))


def kept(root: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / f".rlhf/{name}.jsonl").read_text().splitlines()]


def rates(rows: list[dict[str, Any]], side: str) -> dict[str, float]:
    """The share of replies that pass each check, of those it applies to, and every check that
    does.
    """
    outcomes = [row[f"{side}_checks"] for row in rows]
    said = {
        name: [each[name] for each in outcomes if each[name] is not None] for name in outcomes[0]
    }
    passed = [all(value is not False for value in each.values()) for each in outcomes]
    return {
        name: sum(each) / len(each) for name, each in {**said, "passed": passed}.items() if each
    }


def require_losses_of_files(
    root: Path, judged: list[dict[str, Any]], losses: dict[str, dict[str, float]]
) -> None:
    """Compute the losses that gates bound again, with their bounds, from what files hold."""
    names = [row["cluster"] for row in judged]

    def of_both(values: Callable[[str], list[float]], names: list[str]) -> tuple[Any, ...]:
        return values("sft"), values("policy"), cluster_codes(names)

    def same(name: str, loss: PairedLoss) -> None:
        for key in ("loss", "loss_high95", "replies", "clusters"):
            found = losses[name].get(key)
            assert found == (pytest.approx(wanted) if (wanted := getattr(loss, key)) else wanted)

    same(
        "missing_ends", share_loss(*of_both(lambda s: [r[f"{s}_finished"] for r in judged], names))
    )
    same("length", growth(*of_both(lambda s: [r[f"{s}_tokens"] for r in judged], names)))
    repetition = [
        {s: trigram_repetition(r[f"{s}_reply"]) for s in ("sft", "policy")} for r in judged
    ]
    same("repetition", rise(*of_both(lambda s: [each[s] for each in repetition], names)))
    regression, safety = kept(root, "regression"), kept(root, "safety")
    names = [row["cluster"] for row in regression]

    def passed(side: str) -> list[bool]:
        return [all(v is not False for v in row[f"{side}_checks"].values()) for row in regression]

    same("regression.passed", share_loss(*of_both(passed, names)))
    if not safety:  # in the synthetic world replies that are judged count too
        known = {row["id"] for row in judged}
        safety = [row for row in regression if row["id"] not in known] + judged
    for name in REFUSAL_CHECKS:
        says = {side: [refusal(name, row, side) for row in safety] for side in ("sft", "policy")}
        if asked := [number for number, said in enumerate(says["sft"]) if said is not None]:
            clusters = cluster_codes([safety[number]["cluster"] for number in asked])
            before, after = ([said[number] for number in asked] for said in says.values())
            same(f"safety.{name}", share_loss(before, after, clusters))


def refusal(name: str, row: dict[str, Any], side: str) -> bool | None:
    """What a check says of a saved reply, in a row with checks or without."""
    if f"{side}_checks" in row:
        return row[f"{side}_checks"][name]
    return REFUSAL_CHECKS[name](
        row["category"], Reply(row[f"{side}_reply"], row[f"{side}_finished"])
    )


TEXT_METRICS_OF_ROWS: dict[str, Callable[[dict[str, Any], str], float]] = {
    "length": lambda row, side: row[f"{side}_tokens"],
    "missing_eos": lambda row, side: not row[f"{side}_finished"],
    "special_tokens": lambda row, side: row[f"{side}_special_tokens"] > 0,
    "repetition": lambda row, side: trigram_repetition(row[f"{side}_reply"]),
}


@pytest.mark.parametrize("source", ["world", "elsewhere"])
def test_the_numbers_of_gates_can_be_computed_again_from_files(
    source: str, tmp_path: Path, models: Path, prompts: list[Prompt]
) -> None:
    rows = prompts
    if source == "elsewhere":
        rows = [made_prompt(f"what is {i} and {i}?", "fact", "a file") for i in range(4)]
    config = CONFIG.model_copy(
        update={"safety": SafetyConfig(prompts=3, replies_per_prompt=2), "kl_samples": 3}
    )
    metrics, outputs = run_stage(tmp_path, models, rows, config)
    for side in ("sft", "policy"):
        replies = [row for row in kept(tmp_path, "drift") if row["side"] == side]
        assert len(replies) == 3 and all(
            len(row["tokens"]) == len(row["logprobs"]) for row in replies
        )
        nats = [-sum(row["reference_logprobs"]) for row in replies]
        tokens = sum(len(row["tokens"]) for row in replies)
        assert math.exp(sum(nats) / tokens) == pytest.approx(
            metrics[side]["perplexity_reference"], rel=1e-12
        )
        differences = [
            sum(row["logprobs"]) + total for row, total in zip(replies, nats, strict=True)
        ]
        if side == "policy":
            assert sum(differences) / 3 == pytest.approx(metrics["kl"], rel=1e-12)
        assert rates(kept(tmp_path, "regression"), side)["passed"] == metrics[side]["regression"]
        for kind in ("preferred", "pretrain"):
            texts = [row for row in kept(tmp_path, "perplexity") if row["side"] == side]
            texts = [row for row in texts if row["kind"] == kind]
            nats_of_kind = -sum(row["log_likelihood"] for row in texts)
            assert math.exp(nats_of_kind / sum(row["tokens"] for row in texts)) == pytest.approx(
                metrics[side][f"perplexity_{kind}"], rel=1e-12
            )
        replies = read_table(outputs.comparisons).to_pylist()
        for name, of_text in TEXT_METRICS_OF_ROWS.items():
            values = [of_text(row, side) for row in replies]
            assert sum(values) / len(values) == pytest.approx(metrics[side][name], rel=1e-12)
    require_losses_of_files(
        tmp_path, read_table(outputs.comparisons).to_pylist(), metrics["losses"]
    )
    own = {name: value for name, value in metrics["regression"].items() if name != "prompts"}
    assert rates(kept(tmp_path, "regression"), "policy") == own
    safety = kept(tmp_path, "safety")
    assert len(safety) == (0 if source == "world" else 2 * 2 * 3)
    if safety:
        counted = rates(safety, "policy")
        counted.pop("passed")
        assert counted == metrics["policy"]["safety"]
        odds = [
            row["policy_refusal_log_odds"] for row in safety if "policy_refusal_log_odds" in row
        ]
        assert len(odds) == 3 and all(map(math.isfinite, odds))
