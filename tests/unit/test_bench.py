"""``make bench`` prints what it has measured before it measures the next."""

from __future__ import annotations

import pytest


def test_a_row_is_printed_as_soon_as_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which the command sets for its process
    from benchmarks import __main__ as bench

    printed = []

    def measured(*_: object) -> float:
        printed.append(capsys.readouterr().out.split())
        return 1.0

    monkeypatch.setattr(bench, "matmul_flops", measured)
    monkeypatch.setattr(bench, "seconds", measured)
    assert len(bench._of_the_demo()) == 2
    of_limit, of_model, of_generation, of_training = printed
    assert (
        of_limit == []
        and "limit" in of_model
        and "generation" in of_generation
        and of_training == []
    )
    assert "training" in capsys.readouterr().out
