"""The public functions: the documented example, models of several kinds, and what is refused."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from unit.api.conftest import CRITIC_FREE, PPO, QUESTIONS, LanguageModel, by_length
from unit.ppo.tiny import Interrupting
from unit.training.tiny import demonstrations, make_workspace, preferences, prompts

import rlhf_core as rlhf
from rlhf_core.models.causal_lm import load_policy, save_policy

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def gpt2(llama: LanguageModel) -> LanguageModel:
    """Another architecture, with learned positions and tied weights; its tokenizer knows no roles
    and no padding.
    """
    tokenizer = copy.deepcopy(llama[1])
    tokenizer.chat_template = None
    tokenizer.pad_token = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = GPT2Config(
            vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval(), tokenizer


@pytest.fixture(params=["llama", "gpt2"])
def language_model(request: pytest.FixtureRequest) -> LanguageModel:
    found: LanguageModel = request.getfixturevalue(request.param)
    return found


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def pretrained(
    model: Any,
    tokenizer: Any,
    config: rlhf.PpoConfig,
    context: rlhf.RunContext | None = None,
    **settings: Any,
) -> rlhf.TrainedCritic:
    """A critic after one rollout, unless ``settings`` ask for another number."""
    critic = rlhf.CriticConfig(**{"max_rollouts": 1} | settings)
    rollout = config.rollout
    return rlhf.train_critic(
        model, tokenizer, QUESTIONS, by_length, rollout=rollout, config=critic, context=context
    )


@pytest.mark.slow
def test_the_example_of_the_docs_runs(
    llama: LanguageModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert 25 <= len([line for line in code.splitlines() if line.strip()]) <= 40
    save_policy(tmp_path / "base", *llama)
    small = code.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(tmp_path / "base")))
    small = small.replace("iterations=20", "iterations=2").replace(
        '"policy")', f"'{tmp_path}/out')"
    )
    assert small.count(str(tmp_path)) == 2 and "iterations=2," in small
    (tmp_path / "example.py").write_text(small, encoding="utf-8")
    subprocess.run([sys.executable, str(tmp_path / "example.py")], check=True, cwd=tmp_path)
    perplexities, _, rewards, compared = capfd.readouterr().out.strip().splitlines()[-4:]
    rate, low, high = map(float, compared.split())
    assert 0 <= low <= rate <= high <= 1
    before, after = map(float, perplexities.split())
    assert after < before and float(rewards.split()[0]) <= 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_it_trains_any_model_but_not_the_given_one(
    language_model: LanguageModel,
) -> None:
    model, tokenizer = language_model
    before, template = weights(model), tokenizer.chat_template
    rows = [
        {"prompt": row.prompt[0].content, "completion": row.reply} for row in demonstrations(12)
    ]
    sft = rlhf.train_sft(model, tokenizer, rows)
    assert sft.metrics["train_rows"] == 11 and sft.metrics["validation_rows"] == 1
    assert sft.metrics["perplexity"] < sft.metrics["perplexity_before"]
    reward = rlhf.train_reward_model(
        sft.model, sft.tokenizer, preferences(12), validation=preferences(4)
    )
    assert 0 <= reward.metrics["accuracy"] <= 1
    config = rlhf.PpoConfig(**PPO)
    critic = pretrained(sft.model, sft.tokenizer, config, max_rollouts=2)
    assert critic.metrics["rollouts"] == len(critic.history) == 2
    policy = rlhf.train_ppo(
        sft.model, sft.tokenizer, QUESTIONS, by_length, critic,
        referee=reward.model, validation_prompts=[row.prompt[0].content for row in prompts(3)], config=config,
    )  # fmt: skip
    assert len(policy.history) == 3 and policy.choice is not None and policy.samples
    assert policy.history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert not same(weights(policy.model), weights(sft.model))
    assert same(weights(model), before) and tokenizer.chat_template == template


def test_no_steps_of_sft_keep_the_model(llama: LanguageModel) -> None:
    model, tokenizer = llama
    rows = [{"prompt": "a", "completion": "b"}] * 3
    run = rlhf.train_sft(model, tokenizer, rows, config=rlhf.SftConfig(steps=0, max_tokens=64))
    assert same(weights(run.model), weights(model))
    assert run.metrics["perplexity"] == run.metrics["perplexity_before"] > 1
    assert "train_loss" not in run.metrics


def test_a_reward_model_may_be_the_reward(llama: LanguageModel) -> None:
    model, tokenizer = llama
    reward = rlhf.ScalarModel.from_causal_lm(model, 5)
    config = rlhf.PpoConfig(**PPO | {"iterations": 1})
    critic = rlhf.train_critic(
        model, tokenizer, QUESTIONS, reward, rollout=config.rollout, init=reward,
        config=rlhf.CriticConfig(max_rollouts=1),
    )  # fmt: skip
    policy = rlhf.train_ppo(model, tokenizer, QUESTIONS, reward, critic, config=config)
    assert policy.choice is None and len(policy.history) == 1


def test_an_interrupted_run_continues_with_the_same_call(
    llama: LanguageModel, tmp_path: Path
) -> None:
    model, tokenizer = llama
    config = rlhf.PpoConfig(**PPO)
    critic = pretrained(model, tokenizer, config)

    def run(context: rlhf.RunContext | None) -> rlhf.TrainedPolicy:
        fresh = copy.deepcopy(critic)
        return rlhf.train_ppo(
            model, tokenizer, QUESTIONS, by_length, fresh, config=config, context=context
        )

    with pytest.raises(KeyboardInterrupt):
        run(rlhf.RunContext(tmp_path / "work", Interrupting(2)))
    resumed, straight = run(rlhf.RunContext(tmp_path / "work")), run(None)
    assert same(weights(resumed.model), weights(straight.model))


def test_one_critic_serves_several_runs(llama: LanguageModel) -> None:
    model, tokenizer = llama
    config = rlhf.PpoConfig(**PPO)
    critic = pretrained(model, tokenizer, config)
    before, model_was_training = weights(critic.model), model.training
    one, other = (
        rlhf.train_ppo(model, tokenizer, QUESTIONS, by_length, critic, config=config)
        for _ in range(2)
    )
    assert same(weights(one.model), weights(other.model)) and same(weights(critic.model), before)
    assert model.training == model_was_training


def test_replies_to_one_prompt_may_stand_for_a_critic(llama: LanguageModel) -> None:
    model, tokenizer = llama
    policy = rlhf.train_ppo(
        model, tokenizer, QUESTIONS, by_length, config=rlhf.PpoConfig(**PPO | CRITIC_FREE)
    )
    assert len(policy.history) == 3 and "explained_variance" not in policy.history[0]
    assert not same(weights(policy.model), weights(model))


def test_a_folder_belongs_to_one_run(llama: LanguageModel, tmp_path: Path) -> None:
    model, tokenizer = llama
    context, config = rlhf.RunContext(tmp_path / "work"), rlhf.PpoConfig(**PPO)
    critic = pretrained(model, tokenizer, config, context)
    with pytest.raises(rlhf.RlhfError, match="holds a run of train_critic"):
        rlhf.train_ppo(
            model, tokenizer, QUESTIONS, by_length, critic, config=config, context=context
        )
    mine = rlhf.RunContext(tmp_path / "ppo")
    first = rlhf.train_ppo(
        model, tokenizer, QUESTIONS, by_length, critic, config=config, context=mine
    )
    again = rlhf.train_ppo(
        model, tokenizer, QUESTIONS, by_length, critic, config=config, context=mine
    )
    assert same(weights(first.model), weights(again.model))
    for changed in (
        {"config": rlhf.PpoConfig(**PPO | {"seed": 2})},
        {"prompts": QUESTIONS[:8]},
        {"reward": lambda prompts, replies: [-float(len(reply)) for reply in replies]},
    ):
        call = {
            "prompts": QUESTIONS,
            "reward": by_length,
            "critic": critic,
            "config": config,
        } | changed
        with pytest.raises(rlhf.RlhfError, match="with other settings, data or models"):
            rlhf.train_ppo(model, tokenizer, context=mine, **call)


@pytest.mark.slow
def test_adapters_alone_may_be_trained(llama: LanguageModel, tmp_path: Path) -> None:
    model, tokenizer = llama
    lora = rlhf.LoraConfig(rank=2)
    config = rlhf.PpoConfig(**PPO | {"policy_lora": lora, "critic_lora": lora})
    critic = pretrained(model, tokenizer, config, lora=lora)
    policy = rlhf.train_ppo(model, tokenizer, QUESTIONS, by_length, critic, config=config)
    names = [name for name, _ in policy.model.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert policy.history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    moved = dict(policy.model.named_parameters())
    assert any(
        not torch.equal(parameter, moved[name]) for name, parameter in model.named_parameters()
    )
    from peft import PeftModel

    policy.save(tmp_path / "policy")
    adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "policy" / "adapter"))
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        assert torch.allclose(adapted(ids).logits, policy.model(ids).logits, atol=1e-5)


def length_reward(prompts: Any, replies: list[str]) -> list[float]:
    """A reward source of a module."""
    return [float(len(reply)) for reply in replies]


OPTIONS: dict[str, dict[str, Any]] = {
    "one backbone": {"critic_mode": "shared", "critic_optimizer": None, "vf_loss_weight": 0.5},
    "another start": {"policy_init": "base"},
    "plain texts": {"ptx": {"weight": 0.1, "batch_size": 2, "data": "both"}},
    "sources of the settings": {
        "reward": {
            "sources": [
                {"kind": "function", "target": f"{__name__}:length_reward"},
                {"kind": "model"},
            ]
        }
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_every_setting_of_the_stages_is_one_of_the_functions(
    option: str, llama: LanguageModel, tmp_path: Path
) -> None:
    model, tokenizer = llama
    config = rlhf.PpoConfig(**PPO | {"iterations": 1} | OPTIONS[option])
    rlhf.ScalarModel.from_causal_lm(model, 5).save(tmp_path / "models/reward", tokenizer)
    reward = None if option == "sources of the settings" else by_length
    rollout, pretraining = config.rollout, rlhf.CriticConfig(max_rollouts=1)
    critic = rlhf.train_critic(
        model, tokenizer, QUESTIONS, reward, rollout=rollout, config=pretraining,
        context=rlhf.RunContext(tmp_path / "critic", folder=tmp_path),
    )  # fmt: skip
    base = copy.deepcopy(model)
    with torch.no_grad():
        next(base.parameters()).mul_(0.5)
    texts = {"demonstrations": [{"prompt": "a", "completion": "b"}], "pretrain": ["c d"]}
    more = {"base": base} if option == "another start" else texts if option == "plain texts" else {}

    def train(critic: Any, name: str) -> rlhf.TrainedPolicy:
        context = rlhf.RunContext(tmp_path / name, folder=tmp_path)
        return rlhf.train_ppo(
            model, tokenizer, QUESTIONS, reward, critic, config=config, context=context, **more
        )

    policy = train(critic, "ppo")
    (row,) = policy.history
    assert policy.metrics["iterations"] == 1 and "selected" not in policy.metrics
    assert ("critic_lr" in row) == (option != "one backbone") and ("ptx_loss" in row) == (
        option == "plain texts"
    )
    assert ("source_model_mean" in row) == (reward is None)
    assert (abs(row["kl"]) > 1e-6) == (option == "another start")
    critic.save(tmp_path / "models/critic")
    assert same(weights(train(tmp_path / "models/critic", "again").model), weights(policy.model))


@pytest.mark.slow
def test_the_import_is_cheap_and_the_names_exist() -> None:
    code = (
        "import sys, rlhf_core; assert 'torch' not in sys.modules; "
        "print(len([getattr(rlhf_core, name) for name in rlhf_core.__all__]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(rlhf.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'train_sftt'"):
        getattr(rlhf, "train_sftt")  # noqa: B009


@pytest.mark.parametrize("given", ["rm", "models/reward", "a/folder/further/down"])
def test_a_reward_model_may_lie_in_any_folder(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workspace(tmp_path)
    monkeypatch.chdir(tmp_path)
    if given != "models/reward":
        Path(given).parent.mkdir(parents=True, exist_ok=True)
        Path("models/reward").rename(given)
    model, tokenizer = load_policy("models/sft")
    config = rlhf.PpoConfig(**PPO | CRITIC_FREE | {"iterations": 1, "warmup_iterations": 0})
    policy = rlhf.train_ppo(
        model, tokenizer, QUESTIONS, Path(given), config=config, allow_high_learning_rates=True
    )  # fmt: skip
    assert policy.history[0]["reward_std"] > 0
