"""How many processes train a stage, and with which engine. It places a stage; it never changes what the stage computes,
so it stands under ``compute`` and makes nothing stale."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from rlhf_core.config.model import Strict

MIB = 1 << 20
DEFAULT_LOGITS_MIB = 256


class LaunchConfig(Strict):
    """``processes`` run on each of ``nodes`` machines, which meet at ``rendezvous`` (host:port).

    ``zero`` is the stage of DeepSpeed's ZeRO (0 replicates, 1 shards the optimiser, 2 gradients too, 3 weights too);
    ``offload`` keeps the optimiser, or the parameters as well, in CPU memory. ``deepspeed`` names a JSON file that says
    both, and whatever else DeepSpeed can be told. ``frozen`` places reference, reward model and referee: on the device,
    in CPU memory between their phases, or sharded over the ranks.

    ``logits_mib`` bounds the float32 logits of one chunk of positions, in MiB: losses, log-probabilities, entropies and
    KL are computed chunk by chunk, and a training pass computes the logits of each a second time for its gradient. What
    fits into one chunk is computed as a whole.
    """

    engine: Literal["local", "deepspeed"] = "local"
    processes: PositiveInt = 1
    nodes: PositiveInt = 1
    rendezvous: str | None = Field(default=None, pattern=r"^[^:/\s]+:\d+$")
    zero: Literal[0, 1, 2, 3] | None = None
    offload: Literal["none", "optimizer", "parameters"] | None = None
    deepspeed: str | None = None
    gradient_checkpointing: bool = False
    frozen: Literal["device", "offload", "sharded"] = "device"
    logits_mib: PositiveInt = DEFAULT_LOGITS_MIB

    @property
    def ranks(self) -> int:
        """Processes on all machines together."""
        return self.processes * self.nodes

    @property
    def logits_bytes(self) -> int:
        """``logits_mib`` in bytes."""
        return self.logits_mib * MIB

    @model_validator(mode="after")
    def _consistent(self) -> LaunchConfig:
        if self.nodes > 1 and self.rendezvous is None:
            raise ValueError("nodes above 1 meet somewhere: set rendezvous to host:port of one of them")
        sharding = [name for name in ("zero", "offload", "deepspeed") if getattr(self, name) is not None]
        if self.engine != "deepspeed" and (sharding or self.frozen == "sharded"):
            needless = sharding[0] if sharding else "frozen: sharded"
            raise ValueError(f"{needless} is DeepSpeed's: set engine to deepspeed, or leave it out")
        if self.deepspeed is not None and len(sharding) > 1:
            raise ValueError(f"the file {self.deepspeed} says how to shard: leave out zero and offload")
        if self.offload == "parameters" and self.zero != 3:
            raise ValueError("offload parameters needs zero 3, which alone takes weights off the device")
        if self.offload == "optimizer" and self.zero == 0:
            raise ValueError("offload optimizer needs zero 1 or more: zero 0 leaves the optimiser whole")
        return self
