"""Metrics are read from the device together, and are the numbers that reading them one by one would give."""

from __future__ import annotations

import torch
from counted_calls import counted_reads

from rlhf_core.training.device_scalars import device_scalar, read_scalars


def test_all_groups_are_read_at_once_and_numbers_stay_what_they_are() -> None:
    third = torch.tensor(1 / 3, requires_grad=True)
    groups = [{"a": device_scalar(third) / 7, "b": 0.1}, {"a": device_scalar(torch.tensor(3))}]
    with counted_reads() as calls:
        read = read_scalars(groups)
    assert calls.names == ["tolist"]
    assert read == [{"a": float(third.detach()) / 7, "b": 0.1}, {"a": 3.0}]


def test_numbers_alone_need_no_device() -> None:
    with counted_reads() as calls:
        assert read_scalars([{"a": 1.5}, {}]) == [{"a": 1.5}, {}]
    assert calls.names == []
