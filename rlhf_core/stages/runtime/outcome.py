"""How a stage ended, written down for whoever started it through DVC, which keeps neither exit code nor message."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_core.errors import EXIT_INTERRUPTED, EXIT_OK, RlhfError
from rlhf_core.redaction import redacted
from rlhf_core.storage.files import atomic_write_json, read_json

OUTCOMES = Path(".rlhf") / "outcomes"


@dataclass(frozen=True)
class StageExit:
    """Exit code and message of one run of a stage. Times are seconds since the epoch."""

    stage: str
    exit_code: int
    message: str
    started: float
    ended: float

    @classmethod
    def done(cls, stage: str, started: float, ended: float) -> StageExit:
        """The outcome of a stage that ended without an error."""
        return cls(stage, EXIT_OK, "done", started, ended)

    @classmethod
    def failed(cls, stage: str, error: BaseException, started: float, ended: float) -> StageExit:
        """The outcome of a stage that ``error`` ended."""
        if isinstance(error, RlhfError):
            return cls(stage, error.exit_code, str(error), started, ended)
        if isinstance(error, KeyboardInterrupt):
            return cls(stage, EXIT_INTERRUPTED, "interrupted", started, ended)
        return cls(stage, 1, redacted(f"{type(error).__name__}: {error}"), started, ended)

    @property
    def explains(self) -> bool:
        """Whether it names a cause of failure: the stage neither succeeded nor was merely stopped."""
        return self.exit_code not in (EXIT_OK, EXIT_INTERRUPTED)

    def save(self, path: Path) -> None:
        """Write it as JSON, with the ``seconds`` that the stage took."""
        atomic_write_json(path, asdict(self) | {"seconds": round(self.ended - self.started, 3)})

    @classmethod
    def load(cls, path: Path) -> StageExit | None:
        """The outcome in ``path``; None when there is none."""
        if not path.is_file():
            return None
        record = read_json(path)
        del record["seconds"]
        return cls(**record)


def outcome_path(folder: Path, stage: str, rank: int | None = None) -> Path:
    """Where a stage leaves its outcome, or one of its ranks its own."""
    return folder / (f"{stage}.json" if rank is None else f"{stage}.rank-{rank}.json")
