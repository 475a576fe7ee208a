"""Where a stage runs and what it asks of that place; and what the place itself is to be like."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from rlhf_core.config.model import Strict

QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")


def _is_quantity(value: str) -> str:
    if QUANTITY.fullmatch(value) is None:
        raise ValueError("write a quantity as Kubernetes does, such as 64Gi, 500m or 8")
    return value


Quantity = Annotated[str, AfterValidator(_is_quantity)]
Name = Annotated[str, Field(min_length=1)]
PLACE = frozenset({"pool", "queue", "variables", "shared", "remote", "deliver_seconds"})


class Placement(Strict):
    """A work pool, a queue of it, and what the stage's job asks for there; ``null`` leaves the pool's own default.

    The requests are sent as job variables of the same names, so the pool's base job template must know them. Quantities
    are those of Kubernetes (``64Gi``, ``500m``). ``variables`` are further job variables of a template of your own;
    secrets never belong there, since the server shows them.

    ``shared: false`` says that the pool's workers do not see the workspace. Inputs and results then go through the DVC
    remote ``remote`` (``null`` is DVC's default remote), and a job tries for ``deliver_seconds`` (``null`` is 300) to
    reach it.
    """

    pool: Name
    queue: Name | None = None
    image: Name | None = None
    gpus: NonNegativeInt | None = None
    cpus: Quantity | None = None
    memory: Quantity | None = None
    shared_memory: Quantity | None = None
    node_selector: dict[str, str] | None = None
    time_limit_seconds: PositiveInt | None = None
    variables: dict[str, Any] = {}
    shared: bool = True
    remote: Name | None = None
    deliver_seconds: PositiveInt | None = None

    @model_validator(mode="after")
    def _remote_is_needed(self) -> Placement:
        given = [name for name in ("remote", "deliver_seconds") if getattr(self, name) is not None]
        if self.shared and given:
            raise ValueError(
                f"{given[0]} is for workers that do not see the workspace: set shared to false, or leave {given[0]} out"
            )
        return self

    @model_validator(mode="after")
    def _asked_once(self) -> Placement:
        twice = sorted(set(self.variables) & (set(type(self).model_fields) - PLACE))
        if twice:
            raise ValueError(f"variables repeats {', '.join(twice)}, which has a place of its own here; use that one")
        return self

    def job_variables(self) -> dict[str, Any]:
        """What is sent to the pool: the requests that are made, and the further variables."""
        return {**self.model_dump(exclude=set(PLACE), exclude_none=True), **self.variables}


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return {"pool": value}
    if not isinstance(value, dict | Placement):
        raise ValueError("name a work pool, or give a mapping with pool and what the job asks for there")
    return value


PlacementOrPool = Annotated[Placement, BeforeValidator(_named)]


class WorkPoolConfig(Strict):
    """A work pool's share of the settings on the Prefect server; what is not given here stays as it is there.

    ``limit`` is how many jobs may run on the pool at a time. ``queues`` are priorities by name, 1 is served first.
    """

    limit: PositiveInt | None = None
    queues: dict[Name, PositiveInt] = {}
