"""PPO in bfloat16: its rounding stops no run, a wrong weight does, small steps arrive, a resumed run is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from saved_states import whole_state
from unit.ppo.test_trainer import history
from unit.ppo.tiny import Tiny, make_config, make_tiny, make_trainer

from rlhf_core.errors import RlhfError
from rlhf_core.models.heads import ScalarModel
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.ppo.rollout import logprob_differences, predict_tokens, require_agreement
from rlhf_core.sampling.agreement import LIMITS
from rlhf_core.sampling.distribution import Sampling
from rlhf_core.sampling.sampler import LocalSampler, PromptBatch, sample_replies


def in_bfloat16() -> Tiny:
    """The tiny models in bfloat16, their heads in float32, as they are loaded."""
    tiny = make_tiny()
    for model in (tiny.policy, tiny.reference):
        use_float32_unembedding(model.to(torch.bfloat16))
    tiny.critic, tiny.reward = (ScalarModel(one.model.to(torch.bfloat16)) for one in (tiny.critic, tiny.reward))
    return tiny


def test_iterations_in_bfloat16_go_through_and_report_what_was_corrected(tmp_path: Path) -> None:
    tiny = in_bfloat16()
    before = [p.detach().clone() for p in tiny.policy.parameters()]
    make_trainer(tiny, make_config(iterations=2, max_new_tokens=40), tmp_path).run()
    rows = history(tmp_path)
    assert len(rows) == 2 and {p.dtype for p in tiny.policy.parameters()} == {torch.bfloat16}
    for row in rows:
        assert 0 < row["sampling_logp_difference_mean"] <= LIMITS["bfloat16"].mean and row["skipped_steps"] == 0
        assert row["importance_sampling_ratio_mean"] == pytest.approx(1.0, abs=0.05)
    assert any(not torch.equal(a, b) for a, b in zip(before, tiny.policy.parameters(), strict=True))


@pytest.mark.parametrize("factor", [1.0, 1.3], ids=["as it is", "wrong"])
def test_a_wrong_weight_is_noticed_in_bfloat16(factor: float) -> None:
    tiny = in_bfloat16()
    sampling = Sampling(tiny.sampling.eos_id, tiny.sampling.pad_id, 40)
    rollout = sample_replies(LocalSampler.of(tiny.policy), 0, PromptBatch(tiny.prompts, range(20), 3), sampling)
    with torch.no_grad():
        tiny.policy.model.layers[1].mlp.down_proj.weight.mul_(factor)
    scored = predict_tokens(tiny.untrained_pair(sampling), tiny.reference, rollout)
    agreement = logprob_differences(scored.sampler_logprobs, scored.policy_logprobs, scored.response_mask, "bfloat16")
    if factor == 1.0:
        require_agreement(agreement, "bfloat16")
    else:
        with pytest.raises(RlhfError, match="not the one that is scored"):
            require_agreement(agreement, "bfloat16")


def test_a_resumed_bfloat16_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """At a rate whose steps the model's weights do not show: they are in the masters of the checkpoint."""
    rate = {"lr": 1e-5, "schedule": "constant", "warmup": 0.0}
    config = make_config(iterations=3, policy_optimizer=rate, critic_optimizer=rate)
    whole = make_trainer(in_bfloat16(), config, tmp_path / "whole")
    whole.run()
    first = make_trainer(in_bfloat16(), config, tmp_path / "parts")
    for _ in range(2):
        first.iterate()
    first.checkpoints.manager.finish()
    second = make_trainer(in_bfloat16(), config, tmp_path / "parts")
    second.run()
    for name, engine in whole.learner.pair.engines.items():
        expected, resumed = whole_state(engine), whole_state(second.learner.pair.engines[name])
        assert expected.keys() == resumed.keys()
        assert all(torch.equal(expected[key], resumed[key]) for key in expected)
