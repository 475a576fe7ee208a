"""The stages of critic pre-training and PPO on a tiny workspace: a shared backbone, and a run that
rolls back.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture.glossary import undocumented
from clean_files import write_rows
from safetensors.torch import load_file
from traced import missed
from transformers import AutoModelForCausalLM
from unit.training import tiny
from unit.training.tiny import stage_paths

from rlhf_core.api.critic import initial_critic
from rlhf_core.api.ppo import ptx_data
from rlhf_core.config.model import CheckpointConfig, OptimizerConfig
from rlhf_core.config.policy import CriticStageConfig
from rlhf_core.config.ppo import PpoConfig
from rlhf_core.data.schema import PretrainText
from rlhf_core.data.tokens import pad_id
from rlhf_core.errors import DataError, TrainingPaused
from rlhf_core.models.causal_lm import load_tokenizer
from rlhf_core.models.heads import Pooling, ScalarModel
from rlhf_core.ppo.rollout import require_room
from rlhf_core.ppo.update import PtxData
from rlhf_core.stages import critic, ppo
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.tracking.stage_run import Tracker, results
from rlhf_core.training.history import read_history
from rlhf_core.training.run_context import RunContext

SETTINGS: dict[str, Any] = {
    "iterations": 3, "batch_size": 8, "max_new_tokens": 6, "warmup_iterations": 1, "ptx": {"batch_size": 2},
    "selection": {"every": 2, "prompts": 8, "method": "last"}, "checkpoint": {"every": 1},
    "health": {"mode": "report"},
}  # fmt: skip
# Almost no reply of six tokens ends, so most returns are near -3: something that a head on a random
# model can learn.
SHARED = {
    "critic_mode": "shared", "critic_optimizer": None, "vf_loss_weight": 0.5, "reward": {"missing_eos_penalty": 3.0},
}  # fmt: skip


def paths(stage: Any, root: Path, out: Path) -> tuple[Paths, Paths]:
    """Inputs from the workspace (its reward model is the referee too) and the critic from ``out``;
    outputs there.
    """
    return stage_paths(
        stage.STAGE, root, out, referee=root / "models/reward", critic=out / "models/critic"
    )


def context(stage: Any, out: Path, tracker: Tracker | None = None) -> RunContext:
    return RunContext(out / "work" / stage.STAGE.name, tracker or Tracker())


def pretrain(
    root: Path, out: Path, config: PpoConfig, tracker: Tracker | None = None
) -> dict[str, float]:
    settings = CriticStageConfig(
        max_rollouts=4, batch_size=8, explained_variance=1.0, optimizer=OptimizerConfig(lr=1e-2),
        checkpoint=CheckpointConfig(every=2), ppo=config,
    )  # fmt: skip
    return critic.run(settings, *paths(critic, root, out), context(critic, out, tracker))


@pytest.fixture(scope="module")
def shared(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace's outputs after both stages with a shared backbone."""
    out = tmp_path_factory.mktemp("shared")
    config = PpoConfig.model_validate(SETTINGS | SHARED)
    pretrain(workspace, out, config)
    ppo.run(config, *paths(ppo, workspace, out), context(ppo, out))
    return out


def test_pretraining_a_shared_critic_fits_the_head_alone(workspace: Path, shared: Path) -> None:
    sft = load_file(workspace / "models/sft/model.safetensors")
    critic_weights = load_file(shared / "models/critic/model.safetensors")
    head = critic_weights.pop("score.weight")
    assert critic_weights.keys() <= sft.keys()
    assert all(torch.equal(tensor, sft[name]) for name, tensor in critic_weights.items())
    rows = read_history(shared / "history/critic.jsonl")
    losses = [row["value_loss"] for row in rows]
    assert (
        undocumented("history/critic.jsonl", rows) == set()
        and len(losses) == 4
        and losses[-1] < 0.8 * losses[0]
        and bool(head.isfinite().all())
    )


def test_a_shared_critic_begins_with_a_head_of_zeros(workspace: Path, tmp_path: Path) -> None:
    settings = CriticStageConfig(ppo=PpoConfig.model_validate(SETTINGS | SHARED))
    inputs = paths(critic, workspace, tmp_path)[0]
    model = initial_critic(inputs.sft, inputs.reward, settings, settings.ppo.rollout)
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert list(trained) == ["model.score.weight"] and not bool(trained["model.score.weight"].any())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_critic_begins_with_the_head_of_the_reward_model(
    workspace: Path, tmp_path: Path, pooling: Pooling
) -> None:
    sft = workspace / "models/sft"
    reward = ScalarModel.from_causal_lm(sft, 1, pooling=pooling)
    reward.save(tmp_path / "reward", load_tokenizer(sft))
    settings = CriticStageConfig(init="reward")
    first = initial_critic(sft, tmp_path / "reward", settings, settings.ppo.rollout)
    assert first.pooling == pooling
    assert torch.equal(
        first.model.get_submodule("score").weight, reward.model.get_submodule("score").weight
    )


def test_the_policy_of_a_shared_backbone_is_a_plain_model(workspace: Path, shared: Path) -> None:
    """The same tensors as SFT's and nothing else, trained, and loadable without this package."""
    folders = workspace / "models/sft", shared / "models/policy"
    sft, policy = (load_file(folder / "model.safetensors") for folder in folders)
    assert policy.keys() == sft.keys()
    assert any(not torch.equal(policy[name], sft[name]) for name in sft)
    _, info = AutoModelForCausalLM.from_pretrained(
        shared / "models/policy", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert json.loads((shared / "models/policy/config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    rows = read_history(shared / "history/ppo.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3] and "critic_lr" not in rows[0]
    assert (shared / "history/ppo_abandoned.jsonl").read_text() == ""
    metrics = json.loads((shared / "metrics/ppo.json").read_text())
    assert undocumented("metrics/ppo.json", [metrics]) <= {"selected", "last"}
    selected = results({"selected": metrics["selected"]})
    judged = {name for name in selected if "win_rate" in name}
    assert judged == {f"final/selected.referee.win_rate{end}" for end in ("", "_error")}


def test_a_run_that_rolls_back_and_pauses_leaves_its_story(workspace: Path, tmp_path: Path) -> None:
    # A threshold below every KL there is: the rule fires from its first iteration on.
    rules = {
        "kl_runaway": {
            "action": "rollback",
            "threshold": -10.0,
            "window": 1,
            "after": 3,
            "adjust": {"lr": 0.5},
        }
    }
    settings = SETTINGS | {"health": {"max_rollbacks": 1, "rules": rules}}
    config = PpoConfig.model_validate(settings)
    pretrain(workspace, tmp_path, config)
    with pytest.raises(TrainingPaused, match=r"kl_runaway at iteration 3.*1 rollbacks were made"):
        ppo.run(config, *paths(ppo, workspace, tmp_path), context(ppo, tmp_path))
    files = {
        name: read_history(tmp_path / f"history/{name}.jsonl") for name in ("ppo", "ppo_abandoned")
    }
    assert [row["iteration"] for row in files["ppo"]] == [1, 2, 3]
    assert [(row["rollback"], row["iteration"]) for row in files["ppo_abandoned"]] == [
        (1, 2),
        (1, 3),
    ]
    record = files["ppo"][1]["rollbacks"][0]
    assert (record["from"], record["to"], record["lr"]) == (3, 1, 0.5)
    assert undocumented("history/ppo.jsonl", [*files["ppo"], *files["ppo_abandoned"]]) == set()
    samples = [
        json.loads(line) for line in (tmp_path / "samples/ppo.jsonl").read_text().splitlines()
    ]
    assert {sample.get("rollback") for sample in samples} == {None, 1}
    assert files["ppo"][1]["policy_lr"] == pytest.approx(
        0.5 * files["ppo_abandoned"][0]["policy_lr"]
    )


def test_without_a_critic_its_stage_says_so_and_ppo_reads_none(
    workspace: Path, tmp_path: Path
) -> None:
    free = {"advantage": {"estimator": "rloo"}, "replies_per_prompt": 4}
    config = PpoConfig.model_validate(SETTINGS | free)
    metrics = pretrain(workspace, tmp_path, config)
    assert metrics == {
        "rollouts": 0,
        "reason": "no critic is trained: ppo.advantage.estimator rloo needs none",
    }
    assert [path.name for path in (tmp_path / "models/critic").iterdir()] == ["not_trained.json"]
    assert (tmp_path / "history/critic.jsonl").read_text() == ""
    ppo.run(config, *paths(ppo, workspace, tmp_path), context(ppo, tmp_path))
    rows = read_history(tmp_path / "history/ppo.jsonl")
    assert len(rows) == 3 and undocumented("history/ppo.jsonl", rows) == set()
    assert "explained_variance" not in rows[0] and rows[0]["group_reward_std"] > 0
    assert json.loads((tmp_path / "metrics/ppo.json").read_text())["iterations"] == 3


def ptx_of(config: PpoConfig, clean: Path, tokenizer: Any, positions: int | None) -> PtxData | None:
    return ptx_data(
        config, ppo.read_ptx_texts(config, clean, tokenizer), pad_id(tokenizer), positions
    )


def test_texts_over_the_models_positions_are_left_out_or_refused_never_cut(workspace: Path) -> None:
    """Trap 7: a ptx text that does not fit is not used; a prompt that leaves no room for its reply
    stops the stage.
    """
    tokenizer = load_tokenizer(workspace / "models/sft")
    clean, config = workspace / "data/clean", PpoConfig.model_validate(SETTINGS)
    every = ptx_of(config, clean, tokenizer, None)
    assert every is not None
    lengths = sorted(len(context) + len(target) for context, target in every.sequences)
    limit = lengths[len(lengths) // 2]
    fitting = ptx_of(config, clean, tokenizer, limit)
    assert fitting is not None and [
        pair for pair in every.sequences if len(pair[0]) + len(pair[1]) <= limit
    ] == list(fitting.sequences)
    with pytest.raises(DataError, match="no text for the ptx loss"):
        ptx_of(config, clean, tokenizer, 1)
    require_room([[1] * 20], 10, 30)
    with pytest.raises(DataError, match=r"longest prompt \(21 tokens\)"):
        require_room([[1], [1] * 21], 10, 30)


def test_ptx_draws_from_demonstrations_and_plain_texts_alike(
    workspace: Path, tmp_path: Path
) -> None:
    tokenizer, clean = load_tokenizer(workspace / "models/sft"), tmp_path / "clean"
    (clean / "demonstrations").mkdir(parents=True)
    shutil.copy(workspace / "data/clean/demonstrations/train.parquet", clean / "demonstrations")

    def texts(data: str) -> PtxData:
        config = PpoConfig.model_validate(SETTINGS | {"ptx": {"data": data, "batch_size": 4}})
        found = ptx_of(config, clean, tokenizer, None)
        assert found is not None
        return found

    asked = [
        texts("demonstrations").sequences[row]
        for row in range(len(texts("demonstrations").sequences))
    ]
    assert len(texts("both").sequences) == len(asked), (
        "without plain texts there are the demonstrations"
    )
    plain = [
        PretrainText(str(row), "the lamp is " + "very " * row, "text", "test", "g")
        for row in range(6)
    ]
    write_rows(clean / "pretrain/train.parquet", plain)
    both = texts("both")
    assert [both.sequences[row] for row in range(len(both.sequences))] == [
        *asked,
        *texts("pretrain").sequences,
    ]
    steps = -(-len(both.sequences) // 4)
    drawn = [text for step in range(steps) for text in both.batch(step)]
    assert all(text in drawn for text in (*asked, *texts("pretrain").sequences)), (
        "an epoch has every text"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward", "critic"])
def test_what_training_executes_is_reached(name: str, workspace: Path) -> None:
    assert missed(name, partial(tiny.run_stage, name, workspace, f"traced-{name}")) == set()


def test_what_ppo_executes_is_reached(workspace: Path) -> None:
    out = workspace / "traced-ppo"
    tiny.run_stage("critic", workspace, "traced-ppo")
    config = PpoConfig.model_validate(SETTINGS | {"iterations": 2})
    assert (
        missed("ppo", lambda: ppo.STAGE.run(config, *paths(ppo, workspace, out), context(ppo, out)))
        == set()
    )
