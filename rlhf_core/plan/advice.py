"""What to change when a plan does not fit: one change after another, those that cost least first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rlhf_core.config.load import Params
from rlhf_core.plan.estimate import Plan, make_plan
from rlhf_core.plan.reinforcement import MICRO_BATCH
from rlhf_core.plan.setting import Setting

# A change that takes away less than this share of what is too much is not worth advising.
WORTHWHILE = 0.05
LORA_RANK = 16


@dataclass(frozen=True)
class Advice:
    """``change`` in words, and the plan with it and every advice before it."""

    change: str
    plan: Plan


@dataclass(frozen=True)
class _Change:
    words: str
    setting: Setting


def advise(plan: Plan) -> tuple[Advice, ...]:
    """Changes that bring the peak down, in order, until the plan fits. Empty when it fits already.

    Smaller batches of sampling and of passes change no result; gradient checkpointing costs time; sharding and
    offloading cost communication; LoRA changes what is learned and therefore comes last.
    """
    taken: list[Advice] = []
    for kind in KINDS:
        while not plan.fits:
            better = _tried(plan, kind)
            if better is None:
                break
            taken.append(better)
            plan = better.plan
    return tuple(taken)


def _tried(plan: Plan, kind: Callable[[Setting], Iterator[_Change]]) -> Advice | None:
    stages = [stage.stage for stage in plan.stages]
    for change in kind(plan.setting):
        after = make_plan(change.setting, stages)
        if _too_much(after) <= _too_much(plan) * (1 - WORTHWHILE):
            return Advice(change.words, after)
    return None


def _too_much(plan: Plan) -> int:
    """Bytes over the limit, over all phases: a change that helps one of two equal peaks must count."""
    limit = plan.limit or 0
    return sum(max(phase.use.total - limit, 0) for stage in plan.stages for phase in stage.phases)


def _placed(setting: Setting, words: str, **changes: object) -> _Change:
    return _Change(words, replace(setting, placement=replace(setting.placement, **changes)))  # type: ignore[arg-type]


def _with(setting: Setting, words: str, section: str, **changes: object) -> _Change:
    part = getattr(setting.params, section).model_copy(update=changes)
    params: Params = setting.params.model_copy(update={section: part})
    return _Change(words, replace(setting, params=params))


def _sampled_together(setting: Setting) -> Iterator[_Change]:
    """Half as many replies at once, where nothing but memory depends on it."""
    params = setting.params
    rows = min(params.ppo.selection.batch_size, params.ppo.selection.prompts) // 2
    if rows:
        selection = params.ppo.selection.model_copy(update={"batch_size": rows})
        yield _with(setting, f"ppo.selection.batch_size {rows}", "ppo", selection=selection)
    rows = min(params.evaluate.batch_size, params.evaluate.prompts) // 2
    if rows:
        yield _with(setting, f"evaluate.batch_size {rows}", "evaluate", batch_size=rows)


def _micro_batches(setting: Setting) -> Iterator[_Change]:
    """Half as many sequences in a pass of PPO (critic pre-training follows), or of SFT."""
    place, params = setting.placement, setting.params
    rows = place.share(max(params.ppo.batch_size // params.ppo.minibatches, params.ppo.ptx.batch_size))
    ppo = min(params.ppo.micro_batch_size or max(MICRO_BATCH, params.ppo.ptx.batch_size), rows) // 2
    if ppo:
        yield _with(setting, f"ppo.micro_batch_size {ppo}", "ppo", micro_batch_size=ppo)
    sft = min(params.sft.micro_batch_size or params.sft.batch_size, place.share(params.sft.batch_size)) // 2
    if sft:
        yield _with(setting, f"sft.micro_batch_size {sft}", "sft", micro_batch_size=sft)


def _checkpointing(setting: Setting) -> Iterator[_Change]:
    if not setting.placement.gradient_checkpointing:
        yield _placed(setting, "gradient checkpointing", gradient_checkpointing=True)


def _sharding(setting: Setting) -> Iterator[_Change]:
    """Training state, then frozen models: what costs least communication first."""
    place = setting.placement
    if place.gpus == 1:
        return
    for stage in range(place.zero_stage + 1, 3):
        yield _deepspeed(setting, f"ZeRO stage {stage}", zero_stage=stage)
    if place.frozen == "on_device":
        yield _deepspeed(setting, "frozen models sharded over the GPUs", frozen="sharded")


def _frozen_away(setting: Setting) -> Iterator[_Change]:
    if setting.placement.frozen != "offloaded":
        yield _placed(setting, "frozen models offloaded to host memory", frozen="offloaded")


def _offload(setting: Setting) -> Iterator[_Change]:
    place = setting.placement
    if not place.offload_optimizer:
        words, stage = "optimiser state offloaded to host memory", max(place.zero_stage, 2)
        yield _deepspeed(setting, words, zero_stage=stage, offload_optimizer=True)
    if place.gpus > 1 and place.zero_stage < 3:
        yield _deepspeed(setting, "ZeRO stage 3", zero_stage=3)
    if not place.offload_parameters:
        words = "parameters offloaded too (ZeRO stage 3)"
        yield _deepspeed(setting, words, zero_stage=3, offload_optimizer=True, offload_parameters=True)


def _deepspeed(setting: Setting, words: str, **changes: object) -> _Change:
    said = words if setting.placement.engine == "deepspeed" else f"DeepSpeed, {words}"
    return _placed(setting, said, engine="deepspeed", **changes)


def _precision(setting: Setting) -> Iterator[_Change]:
    if setting.placement.precision == "float32":
        yield _placed(setting, "weights in bfloat16", precision="bfloat16")


def _token_budget(setting: Setting) -> Iterator[_Change]:
    """Half the token budget of both reward models: fewer pairs in a step, so another batch size."""
    words = []
    for stage in ("reward", "referee"):
        batch = getattr(setting.params, stage).batch
        half = batch.model_copy(update={"token_budget": max(batch.token_budget // 2, 1)})
        setting = _with(setting, "", stage, batch=half).setting
        words.append(f"{stage}.batch.token_budget {half.token_budget}")
    yield _Change(", ".join(words), setting)


def _lora(setting: Setting) -> Iterator[_Change]:
    if not setting.placement.lora_rank:
        yield _placed(setting, f"LoRA of rank {LORA_RANK} instead of training all weights", lora_rank=LORA_RANK)


KINDS = (
    _sampled_together,
    _micro_batches,
    _checkpointing,
    _sharding,
    _frozen_away,
    _precision,
    _offload,
    _token_budget,
    _lora,
)
