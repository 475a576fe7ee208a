"""Whole parameters and optimiser moments of a DeepSpeed engine: reading, writing and temporary gathering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core import distributed

MOMENTS = ("exp_avg", "exp_avg_sq")


class Shards:
    """Access to the shards of one engine. Every method is a collective operation of all ranks."""

    def __init__(self, engine: Any, stage: int, package: Any) -> None:
        self.engine, self.stage, self.package = engine, stage, package

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """A copy of the whole parameter in its computing precision."""
        with self._gather([parameter]):
            return parameter.detach().clone()

    def read(self, parameter: nn.Parameter, steps: int) -> dict[str, Tensor]:
        """Read a parameter's float32 weight and, after ``steps`` > 0 updates, its moments.

        Returns:
            CPU tensors under the keys of ``EngineState``, with NAME in place of the parameter's name.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage == 0 or not parameter.requires_grad:
            tensors = {"weights.NAME": self.weight(parameter).cpu()}
            state = self.engine.optimizer.state.get(parameter, {}) if self.stage == 0 else {}
            return tensors | {f"optimizer.NAME.{k}": v.detach().cpu().clone() for k, v in state.items()}
        tensors = {"weights.NAME": safe_get_full_fp32_param(parameter).cpu()}
        if steps and self._has_moments():
            self._link_moments()
            for slot in MOMENTS:
                tensors[f"optimizer.NAME.{slot}"] = safe_get_full_optimizer_state(parameter, slot).cpu()
            tensors["optimizer.NAME.step"] = torch.tensor(float(steps))
        return tensors

    def write(self, parameter: nn.Parameter, weight: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Write what :meth:`read` returned, from CPU tensors that every rank holds."""
        with torch.no_grad(), self._gather([parameter], modified=True):
            parameter.copy_(weight)
        if self.stage == 0:
            self.engine.optimizer.state.pop(parameter, None)
            if moments:
                self.engine.optimizer.state[parameter] = {
                    k: v.to(parameter.device, copy=True) for k, v in moments.items()
                }
        elif parameter.requires_grad:
            self._write_master(parameter, weight)
            if moments or self._has_moments():
                # A state from before the first step resets the moments of an optimiser that has made steps.
                self._start_moments(float(moments["step"]) if moments else 0.0)
                for slot in MOMENTS:
                    self._write_master(parameter, moments.get(slot, torch.zeros_like(weight)), slot)

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Gather all weights on every rank and remove the hooks that would drop them, so that ranks may run freely."""
        if self.stage < 3:
            yield
            return
        offload = self.engine.optimizer.parameter_offload
        with self._gather(list(model.parameters())):
            offload._remove_module_hooks()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload.setup_zero_stage3_hooks()

    @contextmanager
    def _gather(self, parameters: list[nn.Parameter], modified: bool = False) -> Iterator[None]:
        if self.stage < 3:
            yield
            return
        with self.package.zero.GatheredParameters(parameters, modifier_rank=0 if modified else None):
            yield

    def _write_master(self, parameter: nn.Parameter, value: Tensor, slot: str | None = None) -> None:
        value = value.to(distributed.device(), torch.float32)
        if self.stage < 3:
            mapped: Any = parameter
            mapped.set_full_hp_param(value, slot)
            return
        optimizer = self.engine.optimizer
        part, _ = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=slot)
        # The last rank's part is padded, which DeepSpeed's own setter for whole tensors does not expect.
        flat = torch.nn.functional.pad(value.flatten(), (0, part.numel() * distributed.world_size() - value.numel()))
        optimizer.set_local_hp_param(flat.narrow(0, part.numel() * distributed.rank(), part.numel()), parameter, slot)

    def _flat(self) -> list[Tensor]:
        """The flat float32 partitions that the inner optimiser updates."""
        if self.stage == 3:
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        return list(self.engine.optimizer.single_partition_of_fp32_groups)

    def _has_moments(self) -> bool:
        return all("exp_avg" in self.engine.optimizer.optimizer.state.get(part, {}) for part in self._flat())

    def _start_moments(self, steps: float) -> None:
        """Create the moments, which the optimiser itself makes in its first step and a resumed run needs earlier."""
        inner = self.engine.optimizer.optimizer
        for part in self._flat():
            if "exp_avg" not in inner.state.get(part, {}):
                inner.state[part] = {slot: torch.zeros_like(part) for slot in MOMENTS}
            inner.state[part]["step"] = torch.tensor(steps, device=part.device)
        self._link_moments()

    def _link_moments(self) -> None:
        """Point parameters to their moments.

        DeepSpeed does so once, after the first of several parameter groups was stepped, when the others have none yet.
        """
        if self.stage < 3:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
