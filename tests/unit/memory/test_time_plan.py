"""How long stages take: passes of a real model are measured, and the settings say how many of them there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.config.loading import Params, check_params
from rlhf_extras.memory import time_plan
from rlhf_extras.memory.architecture import Architecture
from rlhf_extras.memory.time_plan import MeanLengths, Probe, TimePlan, mean_lengths, plan_time

TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = MeanLengths(prompt=10, reply=6, train=100, validation=20, test=40)


class CountedTokens(Probe):
    """A machine on which a token takes a second to read, two more to train on, and sampling one takes three."""

    def __init__(self) -> None:
        self.layers = 4

    def train(self, rows: int, width: int, scored: int) -> float:
        return 3.0 * rows * width

    def score(self, rows: int, width: int, scored: int) -> float:
        return 1.0 * rows * width

    def optimiser_step(self) -> float:
        return 0.0

    def generate(self, rows: int, prompt: int, tokens: int) -> float:
        return 3.0 * rows * tokens


def seconds(stage: str, **sections: object) -> float:
    return time_plan._Clock(check_params(sections), CountedTokens(), LENGTHS).stage(stage)


def test_a_supervised_step_is_its_texts_and_micro_batches_change_nothing() -> None:
    steps = {"steps": 10, "batch_size": 8, "eval_every": 100}
    held_out = seconds("sft", sft=steps | {"steps": 0})
    assert seconds("sft", sft=steps) - held_out == pytest.approx(10 * 8 * 16 * 3.0)
    assert seconds("sft", sft=steps | {"micro_batch_size": 2}) == pytest.approx(seconds("sft", sft=steps))


def test_twice_the_iterations_take_twice_as_long_and_no_critic_takes_less() -> None:
    ppo = {"batch_size": 8, "selection": {"every": 1000}, "warmup_iterations": 1}
    few, many = (seconds("ppo", ppo=ppo | {"iterations": count}) for count in (10, 20))
    once = 2 * few - many  # what does not depend on the number of iterations
    assert many - once == pytest.approx(2 * (few - once))
    assert seconds("ppo", ppo=ppo | {"iterations": 10, "advantage": {"estimator": "rloo"}}) < few


def test_a_reader_of_half_the_layers_takes_half_as_long() -> None:
    whole = seconds("judge", judge={"imitation": 0.0})
    assert seconds("judge", judge={"imitation": 0.0, "layers": 2}) == pytest.approx(whole / 2)


def test_every_pass_of_a_real_model_is_measured() -> None:
    probe = Probe(Architecture.of(TINY, "tiny"), "float32")
    times = [probe.train(4, 12, 5), probe.score(4, 12, 5), probe.optimiser_step(), probe.generate(3, 4, 6)]
    assert all(value > 0 for value in times)
    assert all(parameter.grad is None for model in probe.models.values() for parameter in model.parameters())
    assert all(torch.isfinite(parameter).all() for model in probe.models.values() for parameter in model.parameters())


def test_a_deep_model_is_one_layer_and_the_cost_of_each_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(Architecture.of(TINY | {"num_hidden_layers": 30}, "deep"), "float32")
    assert sorted(probe.models) == [1, 3]
    monkeypatch.setattr(probe, "_measured", lambda model, *shape: 5.0 + 2.0 * model.config.num_hidden_layers)
    assert probe.optimiser_step() == pytest.approx(5.0 + 2.0 * 30)


def test_a_plan_names_every_stage_and_lets_readers_run_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_plan, "seconds_of_start", lambda: 1.0)
    monkeypatch.setattr(time_plan, "Probe", lambda *_: CountedTokens())
    monkeypatch.setattr(time_plan, "available_cores", lambda: 2)

    def plan(parallel: int) -> TimePlan:
        params = check_params({"compute": {"threads": 1}, "flow": {"parallel": parallel}})
        return plan_time(tmp_path, params, Architecture.of(TINY, "tiny"))

    alone, beside = plan(1), plan(2)
    assert {"sft", "reward", "referee", "judge", "critic", "ppo", "evaluate"} < alone.stages.keys()
    assert alone.total == pytest.approx(sum(alone.stages.values())) and beside.total < alone.total
    assert "in all" in alone.as_text()


def test_lengths_before_there_are_data_are_those_of_the_files_texts(tmp_path: Path) -> None:
    row = '{"prompt": "' + "p" * 40 + '", "chosen": "' + "c" * 80 + '", "rejected": "' + "r" * 40 + '"}\n'
    (tmp_path / "pairs.jsonl").write_text(row)
    params: Params = check_params({"collect": {"source": "files", "files": {"preferences": ["pairs.jsonl"]}}})
    found = mean_lengths(tmp_path, params)
    assert (found.prompt, found.reply) == (40 / 4 + 8, 60 / 4)
