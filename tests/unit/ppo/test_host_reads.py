"""How often a PPO update waits for the device: as often with many micro-batches as with one."""

from __future__ import annotations

import pytest
from counted_calls import counted_reads
from unit.engine import cases
from unit.ppo.tiny import make_tiny

from rlhf_core.ppo.actor_critic import ActorCriticPair
from rlhf_core.ppo.experience import Experience
from rlhf_core.ppo.update import Learner, update


@pytest.fixture(scope="module")
def experience() -> Experience:
    return cases.rollout(make_tiny())


def reads_of_an_update(experience: Experience, rows: int) -> list[str]:
    """Reads of one step with micro-batches of ``rows``, without those of transformers, which looks at every mask."""
    tiny, config = make_tiny(), cases.ppo_config(0.05, minibatches=1)
    config = config.model_copy(update={"target_kl_early_stop": 100.0})
    engines = {
        "policy": cases.local(tiny.policy, config.policy_optimizer, "policy"),
        "critic": cases.local(tiny.critic, config.critic_optimizer, "critic"),
    }
    pair = ActorCriticPair(tiny.policy, tiny.critic, engines, tiny.sampling, rows)
    with counted_reads() as calls:
        updated = update(Learner(config, pair, tiny.reference), experience, 0.1, 0)
    assert updated.metrics["steps"] == 1 and not updated.paused
    return [name for name in calls.names if name != "__bool__"]


def test_reads_do_not_grow_with_micro_batches(experience: Experience) -> None:
    whole = reads_of_an_update(experience, rows=len(experience))
    assert sorted(reads_of_an_update(experience, rows=1)) == sorted(whole)
    # Norm and losses of both engines, metrics of both models and those before the step, lengths and sizes of the parts.
    assert len(whole) <= 12
