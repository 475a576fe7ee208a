"""A module's source as definitions: what binds which name, and what an import executes.

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
        if isinstance(node, Documented) and node.body:
            first, *others = node.body
            if is_string(first):
                node.body = others or [ast.Pass()]


def is_string(statement: ast.stmt) -> bool:
    """Whether ``statement`` is nothing but a string: a docstring, or one below an attribute."""
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def dotted_name(node: ast.expr) -> tuple[str, ...]:
    """Return the parts of ``a.b.c``; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ()
    return (node.id, *reversed(parts))


# Conditions of statements without ``else``: what they guard is for annotations alone, or is executed
# by no import.
FOR_TYPE_CHECKERS = re.compile(r"(\w+\.)*TYPE_CHECKING")
MAIN_GUARD = "__name__ == '__main__'"
ImportStatement = ast.Import | ast.ImportFrom
Compound = (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.Match)
Assignment = (ast.Assign, ast.AnnAssign, ast.AugAssign)
Named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Import:
    """What an import statement binds a name to: a module, or ``name`` of a module."""

    module: str
    name: str | None = None


@dataclass(eq=False)
class Definition:
    """The top-level statements of a module that bind ``name``.

    Those that act when it is imported are called ``<import>``.
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
        self.name = name
        self.path = path
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
        effects = self.effects.statements
        condition = ""
        if isinstance(statement, ast.If) and not statement.orelse:
            condition = ast.unparse(statement.test)
        if isinstance(statement, ImportStatement):
            self._bind_imports([statement], executed=True)
        elif FOR_TYPE_CHECKERS.fullmatch(condition):
            self._bind_imports(imports_in(statement), executed=False)
        elif condition == MAIN_GUARD:
            return
        elif isinstance(statement, Compound):
            self._bind_imports(imports_in(statement), executed=True)
            self._define(statement)
            effects.append(statement)
        elif isinstance(statement, (*Assignment, *Named)):
            names = self._define(statement)
            # What is added to may be another module's; an assignment that binds nothing changes a
            # table or an object.
            if not names or isinstance(statement, ast.AugAssign):
                effects.append(statement)
        elif not isinstance(statement, ast.Pass) and not is_string(statement):
            effects.append(statement)

    def _define(self, statement: ast.stmt) -> list[str]:
        """Note what a statement binds, and return the names."""
        names = bound_names(statement)
        for name in names:
            if name not in self.definitions:
                self.definitions[name] = Definition(self.name, name)
            self.definitions[name].statements.append(statement)
        return names

    def _bind_imports(self, statements: Iterable[ImportStatement], *, executed: bool) -> None:
        for statement in statements:
            for name, target in self.targets_of(statement):
                self.imports.setdefault(name, []).append(target)
            if executed:
                self.imported += targets_executed(self, statement)

    def targets_of(self, statement: ImportStatement) -> Iterator[tuple[str, Import]]:
        """Yield the names that an import statement binds, each with what it stands for."""
        for alias in statement.names:
            if isinstance(statement, ast.ImportFrom):
                target = Import(self.origin(statement), alias.name)
                yield alias.asname or alias.name, target
            elif alias.asname:
                yield alias.asname, Import(alias.name)
            else:
                root = alias.name.partition(".")[0]
                yield root, Import(root)

    def origin(self, statement: ast.ImportFrom) -> str:
        """Return the absolute name of the module that a ``from`` import takes names from."""
        module = statement.module or ""
        if not statement.level:
            return module
        package = self.name
        if not self.is_package:
            package = self.name.rpartition(".")[0]
        dots = "." * statement.level
        return resolve_name(f"{dots}{module}", package)


def targets_executed(module: Module, statement: ImportStatement) -> list[Import]:
    """Return what an import statement executes: modules, and names that may be modules."""
    if isinstance(statement, ast.Import):
        return [Import(alias.name) for alias in statement.names]
    origin = module.origin(statement)
    return [Import(origin, alias.name) for alias in statement.names]


def imports_in(tree: ast.AST) -> Iterator[ImportStatement]:
    """Yield all import statements inside ``tree``."""
    for node in ast.walk(tree):
        if isinstance(node, ImportStatement):
            yield node


def bound_names(statement: ast.stmt) -> list[str]:
    """Return the names that a top-level statement binds in its module, imports apart.

    Of a compound statement also those that only functions inside it bind: too many names do no
    harm.
    """
    if isinstance(statement, Named):
        return [statement.name]
    bound: list[ast.AST] = [statement]
    if isinstance(statement, Assignment):
        # Not what a comprehension or a lambda in its value binds for itself.
        if isinstance(statement, ast.Assign):
            bound = [*statement.targets]
        else:
            bound = [statement.target]
        for node in ast.walk(statement):
            if isinstance(node, ast.NamedExpr):
                bound.append(node.target)
    names = []
    for target in bound:
        for node in ast.walk(target):
            if isinstance(node, Named):
                names.append(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append(node.id)
    return list(dict.fromkeys(names))


OF_EVERY_MODULE = re.compile(r"__(name|file|doc|path|package|spec)__")


@dataclass
class Reach:
    """What a dotted name leads to.

    Attributes:
        definitions: What it means; none in neutral modules.
        rest: Its attributes behind that.
        inside: False for a name from outside the package.
    """

    definitions: list[Definition] = field(default_factory=list)
    rest: tuple[str, ...] = ()
    inside: bool = True


class Names:
    """The modules of package ``name``, whose folder lies in ``root``.

    Names lead to nothing in ``neutral`` ones.
    """

    def __init__(self, root: Path, name: str, neutral: Collection[str] = ()) -> None:
        self.root = root
        self.name = name
        self.neutral = frozenset(neutral)
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return the module of the package called ``name``, parsed; None when there is none."""
        if name not in self._modules:
            parts = name.split(".")
            base = self.root.joinpath(*parts)
            self._modules[name] = None
            for path in (base / "__init__.py", base.with_suffix(".py")):
                if parts[0] == self.name and path.is_file():
                    self._modules[name] = Module(name, path)
                    break
        return self._modules[name]

    def holder(self, definition: Definition) -> Module:
        """Return the module that a definition is in."""
        module = self.module(definition.module)
        assert module is not None
        return module

    def reach_name(self, module: Module, name: tuple[str, ...]) -> Reach:
        """Return what a dotted name means at the top level of ``module``."""
        first = name[0]
        rest = name[1:]
        own = module.definitions.get(first)
        targets = module.imports.get(first, ())
        imported = [self.reach(target, rest) for target in targets]
        if own is None and not imported:
            return Reach(inside=False, rest=rest)
        if own is None and len(imported) == 1:
            return imported[0]
        definitions = [] if own is None else [own]
        for reach in imported:
            definitions += reach.definitions
        return Reach(definitions, rest)

    def reach(self, target: Import, attributes: tuple[str, ...]) -> Reach:
        """Return what ``attributes`` of an imported module or name lead to.

        Raises:
            LookupError: That cannot be told.
        """
        if target.name is not None:
            attributes = (target.name, *attributes)
        module = self.module(target.module)
        if module is None:
            return Reach(inside=False, rest=attributes)
        if target.module in self.neutral:
            return Reach(rest=attributes[1:])
        if not attributes:
            raise LookupError(f"{target.module} is used as a value; name what is used of it")
        first = attributes[0]
        if first in module.definitions or first in module.imports:
            return self.reach_name(module, attributes)
        submodule = f"{target.module}.{first}"
        if self.module(submodule) is not None:
            return self.reach(Import(submodule), attributes[1:])
        if OF_EVERY_MODULE.fullmatch(first):
            return Reach(rest=attributes)
        raise LookupError(f"{target.module} defines no {first}, which is used of it")

    def executed_by(self, imports: Iterable[Import]) -> Iterator[str]:
        """Yield the modules of the package that imports execute, and the packages around them."""
        for target in imports:
            if self.module(target.module) is None:
                continue
            yield from packages_of(target.module)
            submodule = f"{target.module}.{target.name}"
            if target.name is not None and self.module(submodule) is not None:
                yield submodule


def packages_of(module: str) -> list[str]:
    """Return ``a.b.c``, ``a.b`` and ``a``, which importing ``a.b.c`` executes."""
    packages = [module]
    while "." in module:
        module = module.rpartition(".")[0]
        packages.append(module)
    return packages
