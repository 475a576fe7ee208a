"""The passes that each stage makes by its settings: what it samples, reads and trains on, and how
often.

``rlhf plan --time`` divides them by the limits of GPUs, the forecast of hours by what this machine
does in a probe of seconds. Counted are the passes that take the time of a long run; loading,
checkpoints and statistics are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlhf_core.config.model import EpochLimit
from rlhf_core.config.params import Params
from rlhf_core.config.policy import DpoConfig, RejectionSamplingConfig
from rlhf_core.config.ppo import RolloutConfig
from rlhf_core.config.reward import CURVE_PAIRS, RewardConfig
from rlhf_core.stages.pair_supply import DataSupply
from rlhf_core.stages.run_forecasts import ForecastLine

Kind = Literal["sample", "read", "train"]
PAIRED = ("reward", "referee", "judge")


@dataclass(frozen=True)
class DataShape:
    """Mean tokens of the rows, and how many of them are not trained on.

    Attributes:
        prompt: Tokens of a prompt.
        reply: Tokens of a reply.
        text: Tokens of a plain text.
        demonstrations: Held-out demonstrations.
        test_pairs: Test pairs, which are common to all reward models.
        prompts: Training prompts.
        training_rows: By stage how many rows it trains on, where that is known.
    """

    prompt: float
    reply: float
    text: float
    demonstrations: int = 500
    test_pairs: int = 500
    prompts: int = 1000
    training_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def row(self) -> float:
        """Tokens of a prompt with its reply."""
        return self.prompt + self.reply


@dataclass(frozen=True)
class Work:
    """Passes of one kind by one model.

    Attributes:
        phase: What they are for, such as ``generation`` or ``update``.
        kind: Whether replies are sampled, or rows read or trained on.
        rows: Rows of one step, which ranks divide among themselves.
        prompt: Tokens of a row without logits.
        reply: Tokens of a row with logits, or that are sampled.
        times: How many such steps the stage makes.
        layers: Decoder layers of the model; None for all.
        scalar: Whether the model gives a number, and so has no logits.
        adapters: Whether the weights are frozen under adapters.
        at_once: Rows that are sampled together; 0 for all of a step.
    """

    phase: str
    kind: Kind
    rows: int
    prompt: float
    reply: float
    times: float = 1.0
    layers: int | None = None
    scalar: bool = False
    adapters: bool = False
    at_once: int = 0

    @property
    def tokens(self) -> float:
        """Tokens of all rows of all steps."""
        return self.times * self.rows * (self.prompt + self.reply)


def working_stages(params: Params) -> tuple[str, ...]:
    """The stages that run a model under these settings, in their order."""
    stages = ["base"] if params.base.pretraining is not None else []
    if "gate-sft" not in params.left_out:
        stages.append("sft")
    stages += [name for name in PAIRED if name not in params.left_out]
    if params.policy.method == "ppo" and not params.ppo.advantage.critic_free:
        stages.append("critic")
    return (*stages, "ppo", "evaluate")


def work_of_stage(params: Params, stage: str, data: DataShape) -> list[Work]:
    """List the passes of a whole stage."""
    if stage == "base":
        return _pretraining(params, data)
    if stage == "sft":
        sft = params.sft
        steps = steps_on(sft, data.training_rows.get(stage), sft.batch_size)
        step = Work("update", "train", sft.batch_size, data.prompt, data.reply, steps)
        looks = 1 + steps / sft.eval_every
        return [
            step,
            Work("evaluation", "read", data.demonstrations, data.prompt, data.reply, looks),
        ]
    if stage in PAIRED:
        return _reward_model(getattr(params, stage), data, data.training_rows.get(stage))
    if stage == "critic":
        return critic_rollouts(params, data)
    if stage == "evaluate":
        return _evaluation(params, data)
    by_method = {"ppo": ppo_run, "dpo": _dpo, "rejection_sampling": _rejection_sampling}
    return by_method[params.policy.method](params, data)


def pairs_of_step(config: RewardConfig, row: float) -> int:
    """Return how many pairs a reward model's step has, both sequences of ``row`` tokens."""
    fitting = int(config.batch.token_budget / (2 * row))
    return max(min(fitting, config.batch.max_pairs), config.batch.min_pairs)


def steps_on(config: EpochLimit, rows: int | None, batch_size: int) -> int:
    """Return the optimiser steps on so many training rows; None where their number is not known."""
    if rows is None:
        return config.steps
    return config.within_epochs(math.ceil(rows / batch_size)).steps


def ppo_iteration(params: Params, data: DataShape) -> list[Work]:
    """List the passes of one iteration of PPO; those of a referee are its share of them."""
    ppo = params.ppo
    work = rollout(params, ppo, ppo.batch_size, data, trained=True)
    if params.collect.pairs:
        referee = Work(
            "referee", "read", ppo.batch_size, data.row, 0, 1 / ppo.referee_every,
            params.referee.layers, scalar=True,
        )  # fmt: skip
        work.append(referee)
    steps = ppo.epochs * ppo.minibatches
    rows = ppo.batch_size // ppo.minibatches
    adapters = ppo.policy_lora is not None
    work.append(Work("update", "train", rows, data.prompt, data.reply, steps, adapters=adapters))
    if not ppo.advantage.critic_free and ppo.critic_mode == "separate":
        work.append(
            Work(
                "update",
                "train",
                rows,
                data.row,
                0,
                steps,
                _critic_layers(params),
                scalar=True,
                adapters=ppo.critic_lora is not None,
            )
        )
    if ppo.ptx.weight > 0:
        ptx = Work("update", "train", ppo.ptx.batch_size, 0, data.row, steps, adapters=adapters)
        work.append(ptx)
    return work


def ppo_run(params: Params, data: DataShape) -> list[Work]:
    """List the passes of the stage: its iterations, and the selection of checkpoints."""
    ppo, selection = params.ppo, params.ppo.selection
    work = times(ppo.iterations, ppo_iteration(params, data))
    if selection.method == "referee":
        looks = 1 + ppo.iterations / selection.every
        work += [
            Work(
                "selection", "sample", selection.prompts, data.prompt, data.reply, looks,
                at_once=selection.batch_size,
            ),
            Work("selection", "read", selection.prompts, data.prompt, data.reply, looks),
            Work(
                "selection", "read", selection.prompts, data.row, 0, 2 * looks,
                params.referee.layers, scalar=True,
            ),
        ]  # fmt: skip
    return work


def critic_rollouts(params: Params, data: DataShape, rollouts: int | None = None) -> list[Work]:
    """List the passes of critic pre-training with ``rollouts``, by default the most it makes."""
    config = params.critic
    work = rollout(params, params.ppo, config.batch_size, data, trained=False)
    update = Work(
        "update", "train", config.batch_size // config.minibatches, data.row, 0,
        config.minibatches * config.epochs, _critic_layers(params), scalar=True,
        adapters=config.lora is not None,
    )  # fmt: skip
    return times(config.max_rollouts if rollouts is None else rollouts, [*work, update])


def rollout(
    params: Params, config: RolloutConfig, rows: int, data: DataShape, *, trained: bool
) -> list[Work]:
    """List the passes of one rollout: sampling, scoring by policy, reference and critic, rewards.

    Args:
        trained: Whether the policy is trained; one that is not is its own reference.
    """
    every = params.ppo.importance_sampling_correction.scored_every if trained else 1
    scored = 1 / every + (1 if trained else 0)
    work = [
        Work(
            "generation",
            "sample",
            rows,
            data.prompt,
            data.reply,
            at_once=config.sampling_batch_size or 0,
        ),
        Work("forward", "read", rows, data.prompt, data.reply, scored),
    ]
    if not params.ppo.advantage.critic_free:
        critic = Work(
            "forward", "read", rows, data.row, 0, layers=_critic_layers(params), scalar=True
        )
        work.append(critic)
    if any(source.kind in ("model", "classifier", "ensemble") for source in config.reward.sources):
        reward = Work(
            "rewards", "read", rows, data.row, 0, layers=params.reward.layers, scalar=True
        )
        work.append(reward)
    return work


def times(count: float, work: list[Work]) -> list[Work]:
    """Return the passes of ``count`` equal steps."""
    return [Work(**{**vars(one), "times": count * one.times}) for one in work]


def _critic_layers(params: Params) -> int | None:
    return params.reward.layers if params.critic.init == "reward" else None


def _pretraining(params: Params, data: DataShape) -> list[Work]:
    config = params.base.pretraining
    if config is None:
        return []
    looks = 1 + config.steps / config.eval_every
    return [
        Work("update", "train", config.batch_size, 0, data.text, config.steps),
        Work("evaluation", "read", data.demonstrations, 0, data.text, looks),
    ]


def _reward_model(config: RewardConfig, data: DataShape, training_rows: int | None) -> list[Work]:
    """Steps on pairs, looks at some validation pairs, and a last reading of all test pairs."""
    pairs = pairs_of_step(config, data.row)
    steps = steps_on(config, training_rows, pairs)
    imitated = data.reply / 2 if config.imitation > 0 else 0.0  # of the chosen reply alone
    looks = 1 + steps / config.eval_every
    return [
        Work(
            "update", "train", 2 * pairs, data.row - imitated, imitated, steps,
            config.layers, scalar=True, adapters=config.lora is not None,
        ),
        Work(
            "evaluation", "read", 2 * min(CURVE_PAIRS, data.test_pairs), data.row, 0, looks,
            config.layers, scalar=True,
        ),
        Work(
            "test", "read", 2 * data.test_pairs, data.row, 0, layers=config.layers, scalar=True
        ),
    ]  # fmt: skip


def _dpo(params: Params, data: DataShape) -> list[Work]:
    config: DpoConfig = params.policy.dpo
    rows, adapters = 2 * config.batch_size, params.ppo.policy_lora is not None
    steps = steps_on(config, data.training_rows.get("reward"), config.batch_size)
    return [
        Work("reference", "read", rows, data.prompt, data.reply, steps),
        Work("update", "train", rows, data.prompt, data.reply, steps, adapters=adapters),
    ]


def _rejection_sampling(params: Params, data: DataShape) -> list[Work]:
    config: RejectionSamplingConfig = params.policy.rejection_sampling
    replies = (config.prompts or data.prompts) * config.replies_per_prompt
    step = Work("update", "train", config.batch_size, data.prompt, data.reply, config.steps)
    return [
        Work(
            "generation",
            "sample",
            replies,
            data.prompt,
            data.reply,
            at_once=params.ppo.sampling_batch_size or 0,
        ),
        Work("rewards", "read", replies, data.row, 0, layers=params.reward.layers, scalar=True),
        step,
    ]


def _evaluation(params: Params, data: DataShape) -> list[Work]:
    """Both models answer the prompts, the harmless and harmful ones and those of the KL; judges
    read the replies.
    """
    config = params.evaluate
    judged = config.prompts * config.replies_per_prompt
    others = config.kl_samples + config.safety.prompts * config.safety.replies_per_prompt
    answered, at_once = judged + others, config.batch_size
    judges = max(sum(name not in params.left_out for name in PAIRED), 1)
    return [
        Work("generation", "sample", answered, data.prompt, data.reply, 2, at_once=at_once),
        Work(
            "generation",
            "sample",
            judged,
            data.prompt,
            data.reply,
            config.best_of_n,
            at_once=at_once,
        ),
        Work("drift", "read", config.kl_samples, data.prompt, data.reply, 2),
        Work("perplexity", "read", 2 * config.perplexity.rows, data.prompt, data.reply, 2),
        Work("judging", "read", judged, data.row, 0, 2 * judges, scalar=True),
    ]


def ranks_without_rows(folder: Path, params: Params, supply: DataSupply) -> ForecastLine | None:
    """Warn of stages with fewer rows in a step than ranks; None where there are none.

    ``folder`` and ``supply`` are what any forecast is given.
    """
    found = steps_short_of_rows(params)
    if not found:
        return None
    return ForecastLine("; ".join(found), "give every rank a row", {"stages": found})


def steps_short_of_rows(params: Params) -> list[str]:
    """Say which stages have fewer rows in an optimiser step than ranks, so that the others repeat a
    row of weight 0, and what would do.
    """
    launches = {str(name): launch for name, launch in params.compute.launch.items()}
    found = []
    for stage in working_stages(params):
        ranks = launches[stage].ranks if stage in launches else 1
        for setting, rows, would_do in _rows_of_steps(params, stage, ranks):
            if rows < ranks:
                found.append(
                    f"{stage}: {rows} rows a step on {ranks} ranks ({setting}): {ranks - rows} ranks only repeat a "
                    f"row of weight 0; set {would_do}"
                )
    return found


def _rows_of_steps(params: Params, stage: str, ranks: int) -> Iterator[tuple[str, int, str]]:
    """Yield the setting, the fewest rows of a step, and the setting that would give each rank one."""
    if stage in PAIRED:
        config: RewardConfig = getattr(params, stage)
        if config.steps:
            setting = f"{stage}.batch at {config.max_tokens} tokens"
            yield (
                setting,
                pairs_of_step(config, config.max_tokens),
                f"{stage}.batch.min_pairs={ranks}",
            )
    elif stage == "sft":
        yield "sft.batch_size", params.sft.batch_size, f"sft.batch_size={ranks}"
    elif stage == "critic":
        rows, parts = params.critic.batch_size, params.critic.minibatches
        setting = "critic.batch_size / critic.minibatches"
        yield setting, rows // parts, f"critic.batch_size={ranks * parts}"
    elif stage == "ppo" and params.policy.method == "ppo":
        ppo = params.ppo
        rows, parts = ppo.batch_size, ppo.minibatches
        yield "ppo.batch_size / ppo.minibatches", rows // parts, f"ppo.batch_size={ranks * parts}"
        if ppo.ptx.weight > 0:
            yield "ppo.ptx.batch_size", ppo.ptx.batch_size, f"ppo.ptx.batch_size={ranks}"
    elif stage == "ppo":
        method = params.policy.method
        rows = getattr(params.policy, method).batch_size
        yield f"policy.{method}.batch_size", rows, f"policy.{method}.batch_size={ranks}"
