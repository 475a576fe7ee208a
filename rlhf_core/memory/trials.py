"""Changes of settings that may save memory, by kind and in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rlhf_core.config.launch import LaunchConfig
from rlhf_core.config.loading.load import Params
from rlhf_core.memory.reinforcement import MICRO_BATCH

Changes = dict[str, Any]
LORA_RANK = 16
ADAPTERS = {
    "reward": ("reward.lora",),
    "referee": ("referee.lora",),
    "critic": ("critic.lora",),
    "ppo": ("ppo.policy_lora", "ppo.critic_lora"),
}


def _together(params: Params, stage: str) -> Iterator[Changes]:
    """Half as many replies sampled at once, where nothing but memory depends on it."""
    ppo, ranks = params.ppo, _launch(params, stage).ranks
    if stage == "ppo":
        yield from _half("ppo.selection.batch_size", min(ppo.selection.batch_size, -(-ppo.selection.prompts // ranks)))
    if stage in ("critic", "ppo"):
        mine = -(-(params.critic.batch_size if stage == "critic" else ppo.batch_size) // ranks)
        yield from _half("ppo.sampling_batch_size", min(ppo.sampling_batch_size or mine, mine))
    if stage == "evaluate":
        yield from _half("evaluate.batch_size", min(params.evaluate.batch_size, params.evaluate.prompts))


def _micro_batches(params: Params, stage: str) -> Iterator[Changes]:
    """Half as many sequences in one pass."""
    ranks = _launch(params, stage).ranks
    if stage == "sft":
        rows = -(-params.sft.batch_size // ranks)
        yield from _half("sft.micro_batch_size", min(params.sft.micro_batch_size or rows, rows))
    elif stage in ("critic", "ppo"):
        ppo = params.ppo
        rows = -(-max(ppo.batch_size // ppo.minibatches, ppo.ptx.batch_size) // ranks)
        yield from _half(
            "ppo.micro_batch_size", min(ppo.micro_batch_size or max(MICRO_BATCH, ppo.ptx.batch_size), rows)
        )


def _checkpointing(params: Params, stage: str) -> Iterator[Changes]:
    if stage != "evaluate" and not _launch(params, stage).gradient_checkpointing:
        yield {f"compute.launch.{stage}.gradient_checkpointing": True}


def _sharding(params: Params, stage: str) -> Iterator[Changes]:
    """Training state first, then frozen models: what costs least communication."""
    launch = _launch(params, stage)
    if stage == "evaluate" or launch.ranks == 1 or launch.deepspeed is not None:
        return
    for zero in range(_zero(launch) + 1, 3):
        yield _deepspeed(stage, zero=zero)
    if stage in ("critic", "ppo") and launch.frozen == "device":
        yield _deepspeed(stage, zero=max(_zero(launch), 1), frozen="sharded")


def _frozen_away(params: Params, stage: str) -> Iterator[Changes]:
    if stage in ("critic", "ppo") and _launch(params, stage).frozen != "offload":
        yield {f"compute.launch.{stage}.frozen": "offload"}


def _offloading(params: Params, stage: str) -> Iterator[Changes]:
    launch = _launch(params, stage)
    if stage == "evaluate" or launch.deepspeed is not None:
        return
    if launch.ranks > 1 and _zero(launch) < 3:
        yield _deepspeed(stage, zero=3)
    if launch.offload in (None, "none"):
        yield _deepspeed(stage, zero=max(_zero(launch), 2), offload="optimizer")
    if launch.offload != "parameters":
        yield _deepspeed(stage, zero=3, offload="parameters")


def _bfloat16(params: Params, stage: str) -> Iterator[Changes]:
    """Only where float32 copies are kept of what is trained: plain torch would lose small steps."""
    if params.base.dtype == "float32" and (stage == "evaluate" or _zero(_launch(params, stage)) > 0):
        yield {"base.dtype": "bfloat16"}


def _token_budget(params: Params, stage: str) -> Iterator[Changes]:
    """Fewer pairs in a step: another batch size."""
    if stage in ("reward", "referee"):
        yield from _half(f"{stage}.batch.token_budget", getattr(params, stage).batch.token_budget)


def _lora(params: Params, stage: str) -> Iterator[Changes]:
    paths = ADAPTERS.get(stage, ())
    changes = {f"{path}.rank": LORA_RANK for path in paths if _at(params, path) is None}
    if changes:
        yield changes


KINDS: tuple[Callable[[Params, str], Iterator[Changes]], ...] = (
    _together,
    _micro_batches,
    _checkpointing,
    _sharding,
    _frozen_away,
    _bfloat16,
    _offloading,
    _token_budget,
    _lora,
)


def _half(path: str, value: int) -> Iterator[Changes]:
    if value > 1:
        yield {path: value // 2}


def _deepspeed(stage: str, **changes: Any) -> Changes:
    settings = {"engine": "deepspeed", **changes}
    return {f"compute.launch.{stage}.{name}": value for name, value in settings.items()}


def _launch(params: Params, stage: str) -> LaunchConfig:
    return {str(name): launch for name, launch in params.compute.launch.items()}.get(stage, LaunchConfig())


def _zero(launch: LaunchConfig) -> int:
    if launch.engine == "local":
        return 0
    return 2 if launch.zero is None else launch.zero


def _at(params: Params, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(params, section), name)
