"""Which definitions of a package something reaches, and the hash of them all.

A definition reaches what its names lead to (see ``names``), a class with all of its members, bases and annotations.
Where names alone do not say enough, more is taken:

- every statement that acts when a module is imported (see ``execution``) counts for whatever imports the module;
- a function that calls ``globals``, ``eval`` or ``exec`` reaches all of its own module;
- where ``__subclasses__`` is used, every derived class of the imported modules counts.

A module that is imported by a computed name (``importlib.import_module``) cannot be followed, unless a string begins
that name: a contract test holds the list of such calls.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection
from pathlib import Path

from rlhf_core.fingerprint.definitions import Encoded, encode
from rlhf_core.fingerprint.execution import acts_on_import
from rlhf_core.fingerprint.modules import Definition, Import, Module
from rlhf_core.fingerprint.names import Names, packages_of

# Definitions that agree in text and, this many references deep, in all that they lead to are taken to be the same.
DEPTH = 4
NO_DATA = frozenset({".py", ".pyc", ".pyi", ".typed"})


class Package:
    """The package ``name``, whose folder lies in ``root``; ``neutral`` modules and what they import do not count."""

    def __init__(self, root: Path, name: str, neutral: Collection[str] = ()) -> None:
        self.names = Names(root, name, neutral)
        self._encoded: dict[Definition, Encoded] = {}
        self._digests: dict[tuple[Definition, int], bytes] = {}
        self._effects: dict[Module, list[Definition]] = {}

    def digest(self, module: str, *roots: str) -> str:
        """Hex digest of all that ``roots`` of ``module`` reach, and of the data files beside the modules reached."""
        definitions = self.reached(module, *roots)
        digest = hashlib.sha256()
        for line in sorted({self._digest(definition, DEPTH) for definition in definitions}):
            digest.update(line)
        folders = {self.names.holder(definition).path.parent for definition in definitions}
        for data in sorted(data for folder in folders for data in data_files(folder)):
            digest.update(data.relative_to(self.names.root).as_posix().encode() + b"\0" + data.read_bytes())
        return digest.hexdigest()

    def reached(self, module: str, *roots: str) -> set[Definition]:
        """The definitions that ``roots`` of ``module`` reach, and those that act when a module is imported for them."""
        executed: set[Module] = set()
        reached: set[Definition] = set()
        waiting: list[Definition | str] = [module]
        for root in roots:
            waiting += self.names.reach(Import(module, root), ()).definitions
        subclasses = False
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                source = self.names.module(item)
                if source is not None and source not in executed and item not in self.names.neutral:
                    executed.add(source)
                    waiting += self.effects_of(source)
                    waiting += self.names.executed_by(source.imported)
                    waiting += derived_classes(source) if subclasses else []
            elif item not in reached:
                reached.add(item)
                encoded = self._encode(item)
                waiting += [*packages_of(item.module), *encoded.references]
                waiting += self.names.executed_by(encoded.imported)
                if encoded.uses_subclasses and not subclasses:
                    subclasses = True
                    waiting += [derived for source in executed for derived in derived_classes(source)]
        return reached

    def effects_of(self, module: Module) -> list[Definition]:
        """What acts when ``module`` is imported, in the order of its source, as one definition; none if nothing does.

        A decorated function counts here as well as under its name.
        """
        if module not in self._effects:
            acting = [
                statement
                for definition in module.definitions.values()
                for statement in definition.statements
                if statement not in module.effects and acts_on_import(statement, module.name, self.names.resolve)
            ]
            statements = sorted([*module.effects, *acting], key=lambda statement: statement.lineno)
            self._effects[module] = [Definition(module.name, "<import>", statements)] if statements else []
        return self._effects[module]

    def _encode(self, definition: Definition) -> Encoded:
        if definition not in self._encoded:
            self._encoded[definition] = encode(definition, self.names)
        return self._encoded[definition]

    def _digest(self, definition: Definition, depth: int) -> bytes:
        key = (definition, depth)
        if key not in self._digests:
            encoded = self._encode(definition)
            digest = hashlib.sha256(encoded.text)
            for reference in encoded.references if depth else ():
                digest.update(self._digest(reference, depth - 1))
            self._digests[key] = digest.digest()
        return self._digests[key]


def data_files(folder: Path) -> list[Path]:
    """Files of a package that are not code, such as templates: in ``folder``, or below it in folders without code."""
    hidden = {path for path in folder.iterdir() if path.name.startswith((".", "__pycache__"))}
    data: list[Path] = []
    for path in sorted(set(folder.iterdir()) - hidden):
        if path.is_dir() and not (path / "__init__.py").exists():
            data += data_files(path)
        elif path.is_file() and path.suffix not in NO_DATA and path.name[-1] != "~":
            data.append(path)
    return data


def derived_classes(module: Module) -> list[Definition]:
    """The classes of a module that have bases."""
    return [
        definition
        for definition in module.definitions.values()
        if any(isinstance(statement, ast.ClassDef) and statement.bases for statement in definition.statements)
    ]
