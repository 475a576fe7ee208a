"""ZeRO 3 with replies from a server: PPO, its critic and the evaluation give the numbers of one
process, and no rank holds a model whole."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from clean_files import write_rows
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from unit.evaluation.conftest import QUESTIONS, made_prompt
from unit.evaluation.test_ranks import numbers
from unit.ppo.tiny import RATE

import rlhf_core as rlhf
from rlhf_core.config.base import BaseConfig
from rlhf_core.config.evaluation import EvaluateStageConfig, SafetyConfig
from rlhf_core.config.model import SamplingConfig
from rlhf_core.config.operations import LaunchConfig
from rlhf_core.data.schema import Preference, PretrainText
from rlhf_core.models.causal_lm import load_tokenizer, new_model, save_policy, train_tokenizer
from rlhf_core.models.heads import ScalarModel
from rlhf_core.runtime import distributed
from rlhf_core.sampling.sampler import LocalSampler, Sampler
from rlhf_core.stages import evaluate
from rlhf_core.stages.runtime.contract import Paths
from rlhf_core.training.run_context import RunContext
from rlhf_extras.sampling.weight_transfer import CheckpointWeights

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed (pip install 'rlhf-pipeline[gpu]')",
)
PROMPTS = [question.text for question in QUESTIONS[:8]]
CRITIC = {"max_rollouts": 2, "batch_size": 8, "minibatches": 2, "optimizer": RATE}
PPO = {
    "iterations": 2, "batch_size": 8, "minibatches": 2, "micro_batch_size": 2, "max_new_tokens": 8,
    "warmup_iterations": 0, "policy_optimizer": RATE, "critic_optimizer": RATE, "ptx": {"weight": 0.0},
    "health": {"mode": "report"}, "selection": {"every": 1, "prompts": 5, "batch_size": 2, "method": "last"},
    "sampler": {"kind": "vllm", "python": "never started"}, "importance_sampling_correction": {"mode": "always"},
}  # fmt: skip
EVALUATION = EvaluateStageConfig(
    prompts=5, replies_per_prompt=2, kl_samples=3, batch_size=2, max_new_tokens=6, bootstrap=50, best_of_n=2,
    sampling=SamplingConfig(max_new_tokens=6, repetition_penalty=1.0), safety=SafetyConfig(max_new_tokens=4),
)  # fmt: skip
SHARDED = LaunchConfig(engine="deepspeed", deepspeed="zero3.json", frozen="sharded")


class Elsewhere(Sampler):
    """Samples with a copy of the weights that rank 0 hands over, as a server does; here each rank
    has one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copy = LocalSampler()

    def _take_over(self, policy: Any, version: int) -> None:
        if version % 2:  # weights are sent one by one
            sent = CheckpointWeights(policy)
            weights = {n: w.tolist() for (n, _), w in zip(sent.described, sent, strict=True)}
        else:
            whole = policy.on_host() if hasattr(policy, "on_host") else policy
            assert (
                whole is not None
            ) == distributed.is_rank_zero() or distributed.world_size() == 1
            weights = (
                {n: t.tolist() for n, t in whole.state_dict().items()}
                if distributed.is_rank_zero()
                else {}
            )
        copy = AutoModelForCausalLM.from_config(policy.config).eval()
        told = distributed.broadcast_from_rank0(weights)
        copy.load_state_dict(
            {n: torch.tensor(v) for n, v in told.items()}, strict=False
        )  # tied weights come once
        self.copy.sync(copy, version)

    def _ready(self, rows: int, steps: int) -> Any:
        return self.copy._ready(rows, steps)

    def _draw(self, prompts: Any, sampling: Any) -> Any:
        return self.copy._draw(prompts, sampling)


@contextlib.contextmanager
def elsewhere(*_: Any) -> Iterator[Sampler]:
    yield Elsewhere()


def train(folder: Path, models: Path, launch: LaunchConfig, what: str) -> None:
    """A critic, or a policy with the critic of one process; weights and history in ``folder``."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(models / "extensions")
    own = folder / f"{what}-{distributed.rank()}"
    context, tokenizer = (
        RunContext(own, launch=launch, folder=models),
        load_tokenizer(models / "sft"),
    )
    config = rlhf.PpoConfig.model_validate(PPO)
    trained: Any = None
    with (
        patch("rlhf_core.api.ppo.opened_sampler", elsewhere),
        patch("rlhf_core.api.critic.opened_sampler", elsewhere),
        patch("rlhf_core.stages.evaluate.opened_sampler", elsewhere),
        gathered_together() as gathered,
        contextlib.suppress(distributed.NonzeroRankReleased),
    ):
        if what == "critic":
            trained = rlhf.train_critic(
                    models / "sft", tokenizer, PROMPTS, rollout=config.rollout, init=models / "models" / "reward",
                    config=rlhf.CriticConfig.model_validate(CRITIC), context=context, allow_high_learning_rates=True,
                )  # fmt: skip
        elif what == "evaluate":
            inputs = {key: models / Path(path).name for key, path in evaluate.STAGE.inputs.items()}
            inputs |= {"reward": models / "models" / "reward", "clean": models / "clean"}
            outputs = Paths({key: own / path for key, path in evaluate.STAGE.outputs.items()})
            evaluate.STAGE.run(EVALUATION, Paths(inputs), outputs, context)
            (folder / "evaluate.json").write_bytes(outputs.metrics.read_bytes())
        else:
            trained = rlhf.train_ppo(
                    models / "sft", tokenizer, PROMPTS, critic=models / "critic", referee=models / "referee",
                    validation_prompts=PROMPTS[:5], config=config, context=context, allow_high_learning_rates=True,
                )  # fmt: skip
    if trained is not None:
        trained.save(folder / what)
        (folder / f"{what}.json").write_text(json.dumps(trained.history))
    if launch.frozen == "sharded":
        own.mkdir(exist_ok=True)
        (own / "gathered.json").write_text(json.dumps(gathered))


@contextlib.contextmanager
def gathered_together() -> Iterator[list[int]]:
    """How many parameters were gathered at once, each time that any were."""
    from deepspeed.runtime.zero import partition_parameters

    found: list[int] = []
    own = partition_parameters.GatheredParameters.__init__

    def init(self: Any, params: Any, *arguments: Any, **named: Any) -> None:
        params = [params] if isinstance(params, nn.Parameter) else list(params)
        found.append(len(params))
        own(self, params, *arguments, **named)

    with patch.object(partition_parameters.GatheredParameters, "__init__", init):
        yield found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([question.text for question in QUESTIONS], 300)
    shape = BaseConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, layers=2, heads=2, max_positions=128
    )
    save_policy(root / "sft", new_model(shape, tokenizer, 1), tokenizer)
    save_policy(root / "policy", new_model(shape, tokenizer, 2), tokenizer)
    (root / "models").mkdir()
    for seed, name in enumerate(("models/reward", "referee", "judge"), start=1):
        ScalarModel.from_causal_lm(root / "sft", seed).save(root / name, tokenizer)
    rows = [made_prompt(question.text, question.category) for question in QUESTIONS[:5]]
    write_rows(root / "clean" / "prompts" / "test.parquet", rows)
    pairs = [
        Preference(str(i), rows[i].prompt, "yes" + " so" * i, "no", None, "", "", "")
        for i in range(5)
    ]
    write_rows(root / "clean" / "preferences" / "test.parquet", pairs)
    texts = [
        PretrainText(str(i), f"the boat {i} is red{' and green' * i}.", "", "", "")
        for i in range(5)
    ]
    write_rows(root / "clean" / "pretrain" / "validation.parquet", texts)
    # However small a weight is, it is sharded.
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    (root / "zero3.json").write_text(json.dumps({"zero_optimization": zero}))
    return root


@pytest.fixture(scope="module")
def plain(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process trains in plain torch."""
    folder = tmp_path_factory.mktemp("plain")
    train(folder, models, LaunchConfig(), "critic")
    (models / "critic").symlink_to(folder / "critic")
    train(folder, models, LaunchConfig(), "policy")
    return folder


@pytest.mark.parametrize("what", [pytest.param("critic", marks=pytest.mark.slow), "policy"])
def test_ranks_that_hold_no_model_whole_train_what_one_process_does(
    what: str, models: Path, plain: Path, tmp_path: Path
) -> None:
    run_ranks(train, 2, tmp_path, models, SHARDED, what)
    expected, found = (
        load_file(folder / what / "model.safetensors") for folder in (plain, tmp_path)
    )
    start = load_file(
        models / ("sft" if what == "policy" else "models/reward") / "model.safetensors"
    )
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5)
    assert any(not torch.allclose(start[name], expected[name], atol=1e-3) for name in start)
    histories = (json.loads((folder / f"{what}.json").read_text()) for folder in (plain, tmp_path))
    for one, other in zip(*histories, strict=True):
        same = {
            name: value
            for name, value in one.items()
            if isinstance(value, float) and "second" not in name
        }
        assert {name: other[name] for name in same} == pytest.approx(same, rel=1e-3, abs=1e-4)
    for rank in range(2):
        gathered = json.loads((tmp_path / f"{what}-{rank}" / "gathered.json").read_text())
        assert set(gathered) == {1}, "several weights were whole at once"


@pytest.mark.slow
def test_ranks_that_hold_no_model_whole_evaluate_as_one_process_does(
    models: Path, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    train(tmp_path / "plain", models, LaunchConfig(), "evaluate")
    run_ranks(train, 2, tmp_path, models, SHARDED, "evaluate")
    one, two = (
        json.loads((folder / "evaluate.json").read_text())
        for folder in (tmp_path / "plain", tmp_path)
    )
    assert one["comparison"]["judge"]["prompts"] == 5 and one["kl"] != 0 and "best_of_n" in one
    assert dict(numbers(two)) == pytest.approx(dict(numbers(one)), rel=1e-4, abs=1e-5)
    for rank in range(2):
        assert set(json.loads((tmp_path / f"evaluate-{rank}" / "gathered.json").read_text())) == {1}
