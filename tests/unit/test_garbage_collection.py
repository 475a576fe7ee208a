"""The garbage collector: paused in imports, rare in stages, skipped at the exit."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from rlhf_core.storage.garbage_collection import collect_rarely, paused_collector


def test_the_collector_pauses_and_goes_on_even_after_an_error() -> None:
    with pytest.raises(ValueError, match="once"), paused_collector():
        assert not gc.isenabled()
        raise ValueError("once")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_blocks_of_two_threads_that_overlap_leave_the_collector_as_it_was() -> None:
    first, second = paused_collector(), paused_collector()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled(), "the second block still runs"
    second.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.slow
def test_a_stage_collects_rarely_and_still_frees_cycles() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    before = gc.get_threshold()
    gc.collect()
    try:
        collect_rarely()
        cycle = weakref.ref(Cycle())
        kept = [[number] for number in range(10_000)]
        assert cycle() is not None, "it was collected among the first thousands of objects"
        kept += [[number] for number in range(gc.get_threshold()[0])]
        assert cycle() is None and kept
    finally:
        gc.set_threshold(*before)


def test_at_exit_handlers_run_and_then_nothing_is_left_to_search() -> None:
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000, len(gc.get_objects())))\n"
        "from rlhf_core.storage.garbage_collection import skip_last_collection\n"
        "skip_last_collection()\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    later, last = done.stdout.splitlines()
    assert later == "0" and last.startswith("True ") and int(last.split()[1]) < 100
