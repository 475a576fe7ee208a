"""Whole parameters and optimiser moments of a DeepSpeed engine: reading, writing and temporary gathering."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.pieces import Piece, SavedTensors, pieces_of_rank

MOMENTS = ("exp_avg", "exp_avg_sq")


class Shards:
    """Access to the shards of one engine. Every method must be called by all ranks."""

    def __init__(self, engine: Any, stage: int, package: Any) -> None:
        self.engine, self.stage, self.package = engine, stage, package

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """A copy of the whole parameter in its computing precision."""
        with self._gather([parameter]):
            return parameter.detach().clone()

    def pieces(self, parameter: nn.Parameter, steps: int) -> dict[str, Piece]:
        """This rank's piece of a parameter's float32 weight and, after ``steps`` > 0 updates, of its moments.

        Returns:
            Pieces under the keys of ``EngineState``, with NAME in place of the parameter's name. They are DeepSpeed's
            own memory.
        """
        if self.stage == 0:
            state = self.engine.optimizer.state.get(parameter, {})
            return pieces_of_rank(
                {"weights.NAME": parameter.detach()}
                | {f"optimizer.NAME.{slot}": value for slot, value in state.items()}
            )
        slots: list[str | None] = [None]
        pieces: dict[str, Piece] = {}
        if steps and self._has_moments():
            self._link_moments()
            slots += MOMENTS
            if distributed.is_rank_zero():
                pieces["optimizer.NAME.step"] = Piece.whole(torch.tensor(float(steps)))
        shape, start, count = self._range(parameter)
        for slot in slots if count else ():
            key = "weights.NAME" if slot is None else f"optimizer.NAME.{slot}"
            pieces[key] = Piece.flat(self._master(parameter, slot)[:count], shape, start)
        return pieces

    def write(self, parameter: nn.Parameter, name: str, tensors: SavedTensors) -> None:
        """Write the saved weight ``weights.NAME`` and the moments ``optimizer.NAME.SLOT`` of a parameter."""
        key = f"weights.{name}"
        with torch.no_grad(), self._gather([parameter], modified=True):
            if self.stage < 3 or distributed.is_rank_zero():  # the weight of rank 0 is spread over the others
                parameter.copy_(tensors.whole(key))
        keys = {slot: f"optimizer.{name}.{slot}" for slot in (*MOMENTS, "step")}
        has_moments = keys["step"] in tensors.names
        if self.stage == 0:
            self.engine.optimizer.state.pop(parameter, None)
            if has_moments:
                self.engine.optimizer.state[parameter] = {
                    slot: tensors.whole(key).to(parameter.device, copy=True) for slot, key in keys.items()
                }
            return
        self._write_master(parameter, tensors, key)
        if has_moments or self._has_moments():
            # A state from before the first step resets the moments of an optimiser that has made steps.
            self._start_moments(float(tensors.whole(keys["step"])) if has_moments else 0.0)
            for slot in MOMENTS:
                self._write_master(parameter, tensors, keys[slot] if has_moments else None, slot)

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

    def _range(self, parameter: nn.Parameter) -> tuple[tuple[int, ...], int, int]:
        """Shape of the whole parameter, and the first element and the number of those that this rank updates."""
        mapped: Any = parameter
        if self.stage < 3:
            mapping = mapped._hp_mapping
            if mapping is None:
                return tuple(parameter.shape), 0, 0
            address = mapping.lp_fragment_address
            return tuple(parameter.shape), address.start, address.numel
        size = self._padded_size(parameter)
        start = min(size * distributed.rank(), mapped.ds_numel)
        # The last parts are padded.
        return tuple(mapped.ds_shape), start, min(size, mapped.ds_numel - start)

    def _padded_size(self, parameter: nn.Parameter) -> int:
        """Elements of a rank's part of a sharded parameter: the same on every rank."""
        mapped: Any = parameter
        return int(mapped.ds_tensor.numel())

    def _master(self, parameter: nn.Parameter, slot: str | None) -> Tensor:
        """This rank's part of the float32 weight, or of the moment ``slot``, flat."""
        mapped: Any = parameter
        if self.stage < 3:
            fragment: Tensor = mapped._hp_mapping.get_hp_fragment(slot)
            return fragment
        optimizer = self.engine.optimizer
        part: Tensor
        part, _ = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=True, optim_state_key=slot)
        # What was read from an NVMe disk lies in a buffer that the next parameter takes.
        return part.clone() if optimizer.swap_optimizer else part

    def _write_master(
        self, parameter: nn.Parameter, tensors: SavedTensors, key: str | None, slot: str | None = None
    ) -> None:
        """Set this rank's part of the float32 weight, or of the moment ``slot``, to the saved ``key``; None is zero."""
        _, start, count = self._range(parameter)
        if not count and self.stage < 3:
            return
        values = torch.zeros(count) if key is None or not count else tensors.read(key, start, start + count)
        if self.stage < 3:
            mapped: Any = parameter
            mapped._hp_mapping.get_hp_fragment(slot).data.copy_(values)
            return
        size = self._padded_size(parameter)
        values = torch.nn.functional.pad(values.to(torch.float32), (0, size - count))
        self.engine.optimizer.set_local_hp_param(values, parameter, slot)

    def _flat(self) -> list[Tensor]:
        """The flat float32 partitions that the inner optimiser updates."""
        if self.stage == 3:
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        optimizer = self.engine.optimizer
        # ZeRO 1 in bfloat16 has an optimiser of its own, with another name for the same.
        named = "single_partition_of_fp32_groups"
        return list(getattr(optimizer, named if hasattr(optimizer, named) else "fp32_groups_flat_partition"))

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
