"""What of a definition counts: its syntax tree, with each reference to another definition in place of a name.

A reference is written as the name of what it leads to, however the module was imported, and imports inside functions
are left out. So a definition that moves to another module stays what it was, and so do those that use it. The encoding
names fields and leaves out empty ones, so that it is the same for every version of Python that parses the code alike.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_core.fingerprint.modules import Definition, Import, Module, dotted_name, imports_in, targets_executed
from rlhf_core.fingerprint.names import Names

NOT_ENCODED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
# A function that looks names up at run time may reach everything in its module.
LOOK_UPS = frozenset({"globals", "eval", "exec"})


@dataclass
class Encoded:
    """``text`` stands for the tree of a definition, ``references`` for what it uses, in the order of the text.

    ``imported`` are the imports that it makes itself when it runs.
    """

    text: bytes
    references: list[Definition]
    imported: list[Import]
    uses_subclasses: bool


def encode(definition: Definition, names: Names) -> Encoded:
    """Encode ``definition``, whose names mean what ``names`` says."""
    encoder = _Encoder(names.holder(definition), names)
    for statement in definition.statements:
        encoder.enter(statement)
    text = "".join(encoder.parts).encode()
    return Encoded(text, encoder.references, encoder.imported, encoder.uses_subclasses)


class _Encoder:
    def __init__(self, module: Module, names: Names) -> None:
        self.module, self.names = module, names
        self.parts: list[str] = []
        self.references: list[Definition] = []
        self.own_imports: dict[str, list[Import]] = {}
        self.imported: list[Import] = []
        self.local: set[str] = set()
        self.uses_subclasses = False

    def enter(self, statement: ast.stmt) -> None:
        """Encode one top-level statement. Names that it assigns anywhere may hide those of the module."""
        self.local = set(local_names(statement))
        self.own_imports = {}
        for imported in imports_in(statement):
            self.imported += targets_executed(self.module, imported)
            for name, target in self.module.targets_of(imported):
                self.own_imports.setdefault(name, []).append(target)
        self._node(statement)

    def _node(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name | ast.Attribute) and self._reference(node):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            # One of the package counts by what is used of it, unless its name may mean something else as well.
            for name, target in self.module.targets_of(node):
                if self.names.module(target.module) is None or name in self.local:
                    self.parts.append(f"(import {target.module}:{target.name} as {name})")
            return
        if isinstance(node, ast.Constant):
            self.parts.append(f"{type(node.value).__name__}:{node.value!r}")
            self.references += self.names.reach_text(node.value) if isinstance(node.value, str) else []
            return
        self.parts.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if name not in NOT_ENCODED:
                self._field(name, value)
        self.parts.append(")")

    def _field(self, name: str, value: object) -> None:
        if value is None or value == []:
            return
        self.parts.append(f" {name}=")
        if name in ("annotation", "returns"):
            self._quoted_names(value)
        if isinstance(value, list):
            self.parts.append("[")
            for item in value:
                self._value(item)
                self.parts.append(",")
            self.parts.append("]")
        else:
            self._value(value)

    def _value(self, value: object) -> None:
        if isinstance(value, ast.AST):
            self._node(value)
        else:
            self.parts.append(repr(value))

    def _reference(self, node: ast.Name | ast.Attribute) -> bool:
        """Encode a name by what it leads to; false where it is to be encoded as it is written."""
        name = dotted_name(node)
        if isinstance(node, ast.Attribute):
            self.uses_subclasses |= node.attr == "__subclasses__"
        if not name:
            return False
        if name[0] in LOOK_UPS:
            self.references += self.names.everything_in(self.module)
        targets = self.own_imports.get(name[0])
        if targets is None:
            reached = [self.names.reach_name(self.module, name)]
        else:
            reached = [self.names.reach(target, name[1:]) for target in targets]
        for reach in reached:
            self.references += reach.definitions
        first = reached[0]
        if len(reached) > 1 or not first.inside or name[0] in self.local or len(first.definitions) > 1:
            return False
        used = name[: len(name) - len(first.rest)]
        self.parts.append("@" + ".".join([first.definitions[0].name if first.definitions else used[-1], *first.rest]))
        return True

    def _quoted_names(self, annotation: object) -> None:
        """Names in the strings of an annotation are names, as pydantic and dataclasses read them."""
        for node in ast.walk(annotation) if isinstance(annotation, ast.AST) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in re.findall(r"[A-Za-z_][\w.]*", node.value):
                    self.references += self.names.reach_name(self.module, tuple(name.split("."))).definitions


def local_names(statement: ast.stmt) -> Iterator[str]:
    """Names that something inside ``statement`` assigns, takes as a parameter or defines."""
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if node is not statement:
                    yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.MatchMapping(rest=str(name)):
                yield name
