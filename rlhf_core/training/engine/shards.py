"""Access to the sharded weights and moments of a DeepSpeed engine, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.runtime import distributed
from rlhf_core.training.checkpoints.checkpoint import Piece, SavedTensors, pieces_of_rank

MOMENTS = ("exp_avg", "exp_avg_sq")


class Shards:
    """Access to the shards of one engine. Every method must be called by all ranks."""

    def __init__(self, engine: Any, stage: int, package: Any) -> None:
        self.engine, self.stage, self.package = engine, stage, package

    def pieces(self, parameter: nn.Parameter, steps: int) -> dict[str, Piece]:
        """This rank's piece of a parameter's float32 weight, and of its moments if it has any.

        There are moments after ``steps`` > 0 updates.

        Returns:
            Pieces under the keys of ``Engine.state``, with NAME in place of the parameter's name.
            They are DeepSpeed's own memory.
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
        """Write the saved weight and the saved moments of a parameter.

        They are ``weights.NAME`` and ``optimizer.NAME.SLOT``.
        """
        key = f"weights.{name}"
        with torch.no_grad(), self.gather([parameter], modified=True):
            # The weight of rank 0 is spread over the others.
            if self.stage < 3 or distributed.is_rank_zero():
                parameter.copy_(tensors.whole(key))
        keys = {slot: f"optimizer.{name}.{slot}" for slot in (*MOMENTS, "step")}
        has_moments = keys["step"] in tensors.names
        if self.stage == 0:
            self.engine.optimizer.state.pop(parameter, None)
            if has_moments:
                self.engine.optimizer.state[parameter] = {
                    slot: tensors.whole(key).to(parameter.device, copy=True)
                    for slot, key in keys.items()
                }
            return
        self._write_master(parameter, tensors, key)
        if has_moments or self._has_moments():
            # A state from before the first step resets the moments of an optimiser that has made
            # steps.
            self._start_moments(float(tensors.whole(keys["step"])) if has_moments else 0.0)
            for slot in MOMENTS:
                self._write_master(parameter, tensors, keys[slot] if has_moments else None, slot)

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Gather all weights on every rank, and remove the hooks that would drop them.

        Ranks may then run freely.
        """
        if self.stage < 3:
            yield
            return
        offload = self.engine.optimizer.parameter_offload
        with self.gather(list(model.parameters())):
            offload._remove_module_hooks()
            offload.forward_hooks, offload.backward_hooks = [], []
            try:
                yield
            finally:
                offload.setup_zero_stage3_hooks()

    @contextmanager
    def gather(self, parameters: list[nn.Parameter], modified: bool = False) -> Iterator[None]:
        if self.stage < 3:
            yield
            return
        with self.package.zero.GatheredParameters(
            parameters, modifier_rank=0 if modified else None
        ):
            yield

    def _range(self, parameter: Any) -> tuple[tuple[int, ...], int, int]:
        """The shape of the whole parameter, and the range of it that this rank updates.

        The range is the first element and their number.
        """
        if self.stage < 3:
            if parameter._hp_mapping is None:
                return tuple(parameter.shape), 0, 0
            address = parameter._hp_mapping.lp_fragment_address
            return tuple(parameter.shape), address.start, address.numel
        size = parameter.ds_tensor.numel()  # the same on every rank: the last parts are padded
        start = min(size * distributed.rank(), parameter.ds_numel)
        return tuple(parameter.ds_shape), start, min(size, parameter.ds_numel - start)

    def _master(self, parameter: Any, slot: str | None) -> Tensor:
        """This rank's part of the float32 weight, or of the moment ``slot``, flat."""
        part: Tensor
        if self.stage < 3:
            part = parameter._hp_mapping.get_hp_fragment(slot)
            return part
        optimizer = self.engine.optimizer
        part, _ = optimizer._get_fp32_opt_state_partition(
            parameter, release_swap_buffers=True, optim_state_key=slot
        )
        # What was read from an NVMe disk lies in a buffer that the next parameter takes.
        return part.clone() if optimizer.swap_optimizer else part

    def _write_master(
        self, parameter: Any, tensors: SavedTensors, key: str | None, slot: str | None = None
    ) -> None:
        """Set this rank's part of a float32 weight or moment to what was saved under ``key``.

        None stands for zero.
        """
        _, start, count = self._range(parameter)
        if not count and self.stage < 3:
            return
        values = (
            torch.zeros(count)
            if key is None or not count
            else tensors.read(key, start, start + count)
        )
        if self.stage < 3:
            parameter._hp_mapping.get_hp_fragment(slot).data.copy_(values)
            return
        values = torch.nn.functional.pad(
            values.to(torch.float32), (0, parameter.ds_tensor.numel() - count)
        )
        self.engine.optimizer.set_local_hp_param(values, parameter, slot)

    def _flat(self) -> list[Tensor]:
        """The flat float32 partitions that the inner optimiser updates."""
        if self.stage == 3:
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        optimizer = self.engine.optimizer
        # ZeRO 1 in bfloat16 has an optimiser of its own, with another name for the same.
        named = "single_partition_of_fp32_groups"
        return list(
            getattr(optimizer, named if hasattr(optimizer, named) else "fp32_groups_flat_partition")
        )

    def _has_moments(self) -> bool:
        return all(
            "exp_avg" in self.engine.optimizer.optimizer.state.get(part, {})
            for part in self._flat()
        )

    def _start_moments(self, steps: float) -> None:
        """Create the moments, which a resumed run needs before its first step.

        The optimiser itself makes them in that step.
        """
        inner = self.engine.optimizer.optimizer
        for part in self._flat():
            if "exp_avg" not in inner.state.get(part, {}):
                inner.state[part] = {slot: torch.zeros_like(part) for slot in MOMENTS}
            inner.state[part]["step"] = torch.tensor(steps, device=part.device)
        self._link_moments()

    def _link_moments(self) -> None:
        """Point parameters to their moments.

        DeepSpeed does so once, after the first of several parameter groups was stepped, when the
        others have none yet.
        """
        if self.stage < 3:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
