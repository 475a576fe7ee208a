"""A module's source as definitions: which top-level statement binds which name, and what importing
it executes.

Names are followed through imports, attributes and strings to the definitions that they mean in a
package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import resolve_name
from pathlib import Path

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def drop_docstrings(tree: ast.AST) -> None:
    """Remove the docstrings of ``tree`` and of everything inside it, in place."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and node.body and is_string(node.body[0]):
            node.body = node.body[1:] or [ast.Pass()]


def is_string(statement: ast.stmt) -> bool:
    """Whether ``statement`` is nothing but a string: a docstring, or one below an attribute."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def dotted_name(node: ast.expr) -> tuple[str, ...]:
    """The parts of ``a.b.c``; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else ()


Compound = (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.Match)
Assignment = (ast.Assign, ast.AnnAssign, ast.AugAssign)


@dataclass(frozen=True)
class Import:
    """What an import statement binds a name to: a module, or ``name`` of a module."""

    module: str
    name: str | None = None


@dataclass(eq=False)
class Definition:
    """The top-level statements of a module that bind ``name``; as ``<import>`` those that act when
    it is imported.
    """

    module: str
    name: str
    statements: list[ast.stmt] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Module:
    """The definitions of one source file.

    ``effects`` are the statements that act when the module is imported (a call that registers
    something, a changed table, a condition): they count for every stage that imports the module.
    ``imported`` are the imports executed then.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.is_package = path.name == "__init__.py"
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, list[Import]] = {}
        self.imported: list[Import] = []
        self.effects = Definition(name, "<import>")
        self.tree = ast.parse(path.read_bytes())
        drop_docstrings(self.tree)
        for statement in self.tree.body:
            self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._bind_imports([statement], executed=True)
        elif is_for_type_checkers(statement):
            self._bind_imports(imports_in(statement), executed=False)
        elif is_main_guard(statement):
            return
        elif isinstance(statement, Compound):
            self._bind_imports(imports_in(statement), executed=True)
            self._define(statement, bound_names(statement))
            self.effects.statements.append(statement)
        elif isinstance(
            statement, (*Assignment, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            names = bound_names(statement)
            self._define(statement, names)
            # What is added to may be another module's; an assignment that binds nothing changes a
            # table or an object.
            if not names or isinstance(statement, ast.AugAssign):
                self.effects.statements.append(statement)
        elif not isinstance(statement, ast.Pass) and not is_string(statement):
            self.effects.statements.append(statement)

    def _define(self, statement: ast.stmt, names: Iterable[str]) -> None:
        for name in names:
            self.definitions.setdefault(name, Definition(self.name, name)).statements.append(
                statement
            )

    def _bind_imports(
        self, statements: Iterable[ast.Import | ast.ImportFrom], *, executed: bool
    ) -> None:
        for statement in statements:
            for name, target in self.targets_of(statement):
                self.imports.setdefault(name, []).append(target)
            if executed:
                self.imported += targets_executed(self, statement)

    def targets_of(self, statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Import]]:
        """The names that an import statement in this module binds, each with what it stands for."""
        for alias in statement.names:
            if isinstance(statement, ast.ImportFrom):
                yield alias.asname or alias.name, Import(self.origin(statement), alias.name)
            elif alias.asname:
                yield alias.asname, Import(alias.name)
            else:
                root = alias.name.partition(".")[0]
                yield root, Import(root)

    def origin(self, statement: ast.ImportFrom) -> str:
        """The absolute name of the module that a ``from`` import takes names from."""
        if not statement.level:
            return statement.module or ""
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        return resolve_name("." * statement.level + (statement.module or ""), package)


def is_for_type_checkers(statement: ast.stmt) -> bool:
    """Whether this is ``if TYPE_CHECKING:`` without an ``else``, which binds names for annotations
    alone.
    """
    names_it = isinstance(statement, ast.If) and dotted_name(statement.test)[-1:] == (
        "TYPE_CHECKING",
    )
    return names_it and not getattr(statement, "orelse", None)


def is_main_guard(statement: ast.stmt) -> bool:
    """Whether this is ``if __name__ == "__main__":`` without an ``else``, which no import
    executes.
    """
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    return ast.dump(statement.test) == ast.dump(
        ast.parse('__name__ == "__main__"', mode="eval").body
    )


def targets_executed(module: Module, statement: ast.Import | ast.ImportFrom) -> list[Import]:
    """What an import statement executes: each module named, and each name that may itself be a
    module.
    """
    if isinstance(statement, ast.Import):
        return [Import(alias.name) for alias in statement.names]
    return [Import(module.origin(statement), alias.name) for alias in statement.names]


def imports_in(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All import statements inside ``tree``."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def bound_names(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement binds in its module, imports apart.

    Of a compound statement also those that only functions inside it bind: too many names do no
    harm.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        targets = [
            *targets,
            *(node.target for node in ast.walk(statement) if isinstance(node, ast.NamedExpr)),
        ]
        parts = [part for target in targets for part in ast.walk(target)]
        return [
            part.id
            for part in parts
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        ]
    names = []
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    return list(dict.fromkeys(names))


OF_EVERY_MODULE = re.compile(r"__(name|file|doc|path|package|spec)__")


@dataclass
class Reach:
    """What a dotted name leads to: ``definitions``, after which ``rest`` of its attributes are
    left.

    ``inside`` is false for a name from outside the package. Of neutral modules there are no
    definitions.
    """

    definitions: list[Definition] = field(default_factory=list)
    rest: tuple[str, ...] = ()
    inside: bool = True


class Names:
    """The modules of package ``name``, whose folder lies in ``root``; names lead to nothing in
    ``neutral`` ones.
    """

    def __init__(self, root: Path, name: str, neutral: Collection[str] = ()) -> None:
        self.root, self.name, self.neutral = root, name, frozenset(neutral)
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """The module of the package called ``name``, parsed; None when there is none."""
        if name not in self._modules:
            inside = name == self.name or name.startswith(f"{self.name}.")
            base = self.root.joinpath(*name.split("."))
            files = (base / "__init__.py", base.with_suffix(".py")) if inside else ()
            path = next((file for file in files if file.is_file()), None)
            self._modules[name] = Module(name, path) if path is not None else None
        return self._modules[name]

    def holder(self, definition: Definition) -> Module:
        """The module that a definition is in."""
        module = self.module(definition.module)
        assert module is not None
        return module

    def reach_name(self, module: Module, name: tuple[str, ...]) -> Reach:
        """What a dotted name means at the top level of ``module``."""
        first, rest = name[0], name[1:]
        own = module.definitions.get(first)
        imported = [self.reach(target, rest) for target in module.imports.get(first, ())]
        if own is None and not imported:
            return Reach(inside=False, rest=rest)
        if own is None and len(imported) == 1:
            return imported[0]
        definitions = [definition for reach in imported for definition in reach.definitions]
        return Reach([*([own] if own is not None else []), *definitions], rest)

    def reach(self, target: Import, attributes: tuple[str, ...]) -> Reach:
        """What ``attributes`` of an imported module or name lead to."""
        return self._attribute(
            target.module, (target.name, *attributes) if target.name is not None else attributes
        )

    def executed_by(self, imports: Iterable[Import]) -> Iterator[str]:
        """Modules of the package that imports execute: those named, the packages around them, and
        submodules.
        """
        for target in imports:
            if self.module(target.module) is not None:
                yield from packages_of(target.module)
                if (
                    target.name is not None
                    and self.module(f"{target.module}.{target.name}") is not None
                ):
                    yield f"{target.module}.{target.name}"

    def _attribute(self, module_name: str, attributes: tuple[str, ...]) -> Reach:
        """What a chain of attributes of a module leads to; ``LookupError`` where that cannot be
        told.
        """
        module = self.module(module_name)
        if module is None:
            return Reach(inside=False, rest=attributes)
        if module_name in self.neutral:
            return Reach(rest=attributes[1:])
        if not attributes:
            raise LookupError(f"{module_name} is used as a value; name what is used of it")
        bound = self._bound(module_name, attributes)
        if bound is not None:
            return bound
        if self.module(f"{module_name}.{attributes[0]}") is not None:
            return self._attribute(f"{module_name}.{attributes[0]}", attributes[1:])
        if OF_EVERY_MODULE.fullmatch(attributes[0]):
            return Reach(rest=attributes)
        raise LookupError(f"{module_name} defines no {attributes[0]}, which is used of it")

    def _bound(self, module_name: str, name: tuple[str, ...]) -> Reach | None:
        """What ``name`` means in a module that binds it; None when it does not."""
        module = self.module(module_name)
        if module is None or (name[0] not in module.definitions and name[0] not in module.imports):
            return None
        return self.reach_name(module, name)


def packages_of(module: str) -> list[str]:
    """``a.b.c``, ``a.b`` and ``a``: what importing ``a.b.c`` executes."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
