"""Append-only entries of a registered model, kept where no call can change them: as parameters of an MLflow run.

MLflow refuses another value for a parameter that a run has, by a unique key of its database. That makes appending a
compare-and-set, on SQLite and on a server: of two processes that write the same number, one is refused. The run is the
one that registered the first version of the model, which every registered model has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.registry.transactions.aliases import registered_model, registry_errors, versions
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import RegisteredModel

LEDGER_TAG = "rlhf.ledger_run"
ENTRY_LIMIT = 5000  # characters; MLflow cuts parameters off at 6000


class EntryTaken(RlhfError):
    """Another process has written the entry of that number; nothing was changed."""


@dataclass(frozen=True)
class Ledger:
    """The entries ``KIND.NAME.1``, ``KIND.NAME.2``, … of the registered model ``name``.

    ``run_id`` is None as long as the model has no version; such a ledger is empty, and nothing can be appended.
    ``tagged`` says whether a tag of the model keeps it: versions may be deleted later.
    """

    client: MlflowClient
    name: str
    kind: str
    run_id: str | None
    tagged: bool

    @classmethod
    def open(cls, client: MlflowClient, name: str, kind: str, model: RegisteredModel | None = None) -> Ledger:
        """Find the ledger of a registered model; ``RlhfError`` if the registry does not answer.

        Args:
            model: The registered model, if it has just been looked up.
        """
        model = model or registered_model(client, name)
        kept = None if model is None else model.tags.get(LEDGER_TAG)
        run_id = kept
        if run_id is None and model is not None and (listed := versions(client, name)):
            run_id = listed[-1].run_id
        return cls(client, name, kind, run_id, tagged=kept is not None)

    def entries(self) -> Sequence[str]:
        """Read all entries, oldest first.

        Raises:
            RlhfError: The run is gone, or an entry is missing between others.
        """
        if self.run_id is None:
            return ()
        with registry_errors(f"read the {self.kind} of {self.name}"):
            params = self.client.get_run(self.run_id).data.params
        prefix = self._key("")
        own = {key.removeprefix(prefix): text for key, text in params.items() if key.startswith(prefix)}
        numbered = {number: text for number, text in own.items() if number.isdecimal()}
        expected = [str(number) for number in range(1, len(numbered) + 1)]
        missing = sorted(set(expected) - set(numbered), key=int)
        if missing:
            raise RlhfError(
                f"the {self.kind} of {self.name} lacks entry {missing[0]} (run {self.run_id} of MLflow); "
                "nothing is decided on an incomplete record: restore MLflow's database from a backup"
            )
        return [numbered[number] for number in expected]

    def append(self, number: int, text: str) -> None:
        """Write entry ``number``, for good. Writing the same text again changes nothing.

        Raises:
            EntryTaken: The entry exists with another text.
            RlhfError: The registry does not answer, or the text is too long.
        """
        from mlflow.exceptions import MlflowException

        if self.run_id is None:
            raise RlhfError(f"{self.name} has no version yet, so there is nothing to record about it")
        if len(text) > ENTRY_LIMIT:
            raise RlhfError(f"an entry of the {self.kind} of {self.name} is too long: {len(text)} characters")
        with registry_errors(f"record entry {number} in the {self.kind} of {self.name}; nothing has changed"):
            if not self.tagged:
                self.client.set_registered_model_tag(self.name, LEDGER_TAG, self.run_id)
            try:
                self.client.log_param(self.run_id, self._key(str(number)), text)
            except MlflowException:  # of another value, but of a deleted run too
                if len(self.entries()) >= number:
                    raise EntryTaken(
                        f"{self.name} was changed from elsewhere meanwhile (entry {number} of its {self.kind}); "
                        "nothing has changed here: look at `rlhf history` and try again"
                    ) from None
                raise

    def _key(self, number: str) -> str:
        """The name of a parameter, in the characters that MLflow allows."""
        name = "".join(character if character.isalnum() or character in "_-. " else "_" for character in self.name)
        return f"{self.kind}.{name[:200]}.{number}"
