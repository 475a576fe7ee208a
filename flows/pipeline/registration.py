"""The last steps of a pipeline run: register what passed its gates, let the challenger meet the champion."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.registry.promotion.promote import promote
from flows.registry.transactions.decisions import PromotionDecision
from flows.registry.versions.register import register
from rlhf_core.config.loading.load import load_params
from rlhf_core.storage.garbage_collection import paused_collector

MATCH_LOG = "match"


@dataclass(frozen=True)
class RegistrationSummary:
    """One line on what was registered and what was refused, and the version of the policy that may be promoted."""

    message: str
    challenger: str | None


class LibraryLoader:
    """Imports what the registered models' code needs in a thread, while the report is written: it takes seconds."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=_import_libraries, name="library-loader")

    def start(self) -> None:
        """Begin, once."""
        if self._thread.ident is None:
            self._thread.start()

    def wait(self) -> None:
        """Wait for the end, if it has begun: modules must not be imported by two threads at a time."""
        if self._thread.ident is not None:
            self._thread.join()


def _import_libraries() -> None:
    with paused_collector():
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


@task(name="register", task_run_name="register", persist_result=False, cache_policy=NO_CACHE)
def register_task(workspace: Path, run_id: str | None = None) -> RegistrationSummary:
    """Register the models of the workspace that passed their gates."""
    result = register(workspace, run_id)
    return RegistrationSummary(result.describe(), result.challenger(load_params(workspace).registry.policy))


@task(name="promote", task_run_name="promote", persist_result=False, cache_policy=NO_CACHE)
def promote_task(workspace: Path, version: str) -> PromotionDecision:
    """Decide on the version that this run registered, whatever has become challenger from elsewhere since."""
    return promote(workspace, version=version)
