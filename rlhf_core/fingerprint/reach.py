"""Which definitions of a package something reaches, and the hash of them all.

A definition reaches what its names lead to (see ``modules``), a class with all of its members,
bases and annotations. Whatever imports a module reaches the statements of it that bind no name,
such as a call, a loop or an entry in a table.

What no name leads to cannot be followed, so the package has none of it, which a contract test
holds: star imports, ``globals``, ``eval``, ``exec``, ``__subclasses__``, a module that is used as a
value, and functions, classes or objects that enter themselves in a table when they are made. The
test also holds which modules import by a computed name.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

from rlhf_core.fingerprint.modules import (
    Definition,
    Import,
    ImportStatement,
    Module,
    Names,
    dotted_name,
    imports_in,
    packages_of,
    targets_executed,
)

NOT_ENCODED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})


class Encoded:
    """The syntax tree of a definition as a text that has, for each name, what the name leads to.

    It is the name of the definition that is reached, however the module was imported, and imports
    inside functions are left out. So a definition that moves to another module stays what it was,
    and so do those that use it. The text names fields and leaves out empty ones, so that it is the
    same for every version of Python that parses the code alike.

    Attributes:
        text: The text, in UTF-8.
        references: What the definition uses, in the order of the text.
        imported: The imports that it makes itself when it runs.
    """

    def __init__(self, definition: Definition, names: Names) -> None:
        self.module = names.holder(definition)
        self.names = names
        self.parts: list[str] = []
        self.references: list[Definition] = []
        self.imported: list[Import] = []
        for statement in definition.statements:
            self._enter(statement)
        self.text = "".join(self.parts).encode()

    def _enter(self, statement: ast.stmt) -> None:
        """Encode one top-level statement, whose own names may hide those of the module."""
        self.local = set(local_names(statement))
        self.own_imports: dict[str, list[Import]] = {}
        for imported in imports_in(statement):
            self.imported += targets_executed(self.module, imported)
            for name, target in self.module.targets_of(imported):
                self.own_imports.setdefault(name, []).append(target)
        self._node(statement)

    def _node(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name | ast.Attribute) and self._reference(node):
            return
        if isinstance(node, ImportStatement):
            # One of the package counts by what is used of it, unless its name may mean something
            # else as well.
            for name, target in self.module.targets_of(node):
                is_own = self.names.module(target.module) is not None
                if not is_own or name in self.local:
                    self.parts.append(f"(import {target.module}:{target.name} as {name})")
            return
        if isinstance(node, ast.Constant):
            self.parts.append(f"{type(node.value).__name__}:{node.value!r}")
            return
        self.parts.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if name in NOT_ENCODED or value is None or value == []:
                continue
            self.parts.append(f" {name}=")
            if not isinstance(value, list):
                self._value(value)
                continue
            self.parts.append("[")
            for item in value:
                self._value(item)
                self.parts.append(",")
            self.parts.append("]")
        self.parts.append(")")

    def _value(self, value: object) -> None:
        if isinstance(value, ast.AST):
            self._node(value)
        else:
            self.parts.append(repr(value))

    def _reference(self, node: ast.Name | ast.Attribute) -> bool:
        """Encode a name by what it leads to; false where it is to be encoded as it is written."""
        name = dotted_name(node)
        if not name:
            return False
        targets = self.own_imports.get(name[0])
        if targets is None:
            reached = [self.names.reach_name(self.module, name)]
        else:
            attributes = name[1:]
            reached = [self.names.reach(target, attributes) for target in targets]
        for reach in reached:
            self.references += reach.definitions
        first = reached[0]
        is_ambiguous = len(reached) > 1 or len(first.definitions) > 1
        if is_ambiguous or not first.inside or name[0] in self.local:
            return False
        if first.definitions:
            meant = first.definitions[0].name
        else:
            used = name[: len(name) - len(first.rest)]
            meant = used[-1]
        self.parts.append("@" + ".".join([meant, *first.rest]))
        return True


def local_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that something inside ``statement`` assigns, takes or defines."""
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                yield name
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                if node is not statement:
                    yield name
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield name
            case ast.MatchMapping(rest=str(name)):
                yield name


# Definitions that agree in text and, this many references deep, in all that they lead to are taken
# to be the same.
DEPTH = 4
NO_DATA = frozenset({".py", ".pyc", ".pyi", ".typed"})


class Package:
    """The package ``name``, whose folder lies in ``root``.

    Modules that are ``neutral``, and what they import, do not count.
    """

    def __init__(self, root: Path, name: str, neutral: Collection[str] = ()) -> None:
        self.names = Names(root, name, neutral)
        self._encode: Callable[[Definition], Encoded] = cache(
            lambda definition: Encoded(definition, self.names)
        )
        self._digests: dict[tuple[Definition, int], bytes] = {}

    def digest(self, module: str, *roots: str) -> str:
        """Return a hex digest of all that ``roots`` of ``module`` reach.

        Data files beside the modules count too.
        """
        of_definitions = set()
        folders = set()
        for definition in self.reached(module, *roots):
            of_definitions.add(self._digest(definition, DEPTH))
            folders.add(self.names.holder(definition).path.parent)
        files: list[Path] = []
        for folder in folders:
            files += data_files(folder)
        digest = hashlib.sha256()
        for line in sorted(of_definitions):
            digest.update(line)
        for file in sorted(files):
            name = file.relative_to(self.names.root).as_posix()
            digest.update(name.encode())
            digest.update(b"\0")
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def reached(self, module: str, *roots: str) -> set[Definition]:
        """Return what ``roots`` of ``module`` reach, and what acts when a module is imported."""
        executed: set[Module] = set()
        reached: set[Definition] = set()
        waiting: list[Definition | str] = [module]
        for root in roots:
            reach = self.names.reach(Import(module, root), ())
            waiting += reach.definitions
        while waiting:
            item = waiting.pop()
            if isinstance(item, str):
                source = self.names.module(item)
                if source is None or source in executed or item in self.names.neutral:
                    continue
                executed.add(source)
                if source.effects.statements:
                    waiting.append(source.effects)
                waiting += self.names.executed_by(source.imported)
            elif item not in reached:
                reached.add(item)
                encoded = self._encode(item)
                waiting += [*packages_of(item.module), *encoded.references]
                waiting += self.names.executed_by(encoded.imported)
        return reached

    def _digest(self, definition: Definition, depth: int) -> bytes:
        key = (definition, depth)
        if key not in self._digests:
            encoded = self._encode(definition)
            digest = hashlib.sha256(encoded.text)
            if depth:
                for reference in encoded.references:
                    digest.update(self._digest(reference, depth - 1))
            self._digests[key] = digest.digest()
        return self._digests[key]


def data_files(folder: Path) -> list[Path]:
    """Return the files in ``folder``, or in folders without code below, that are not code."""
    data: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")):
            continue
        if path.is_dir() and not (path / "__init__.py").exists():
            data += data_files(path)
        elif path.is_file() and path.suffix not in NO_DATA and path.name[-1] != "~":
            data.append(path)
    return data
