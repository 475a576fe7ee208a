"""Which definitions of a package something reaches, and the hash of them all.

A definition reaches what its names lead to (see ``modules``), a class with all of its members, bases and annotations.
Where names alone do not say enough, more is taken:

- every statement that acts when a module is imported (see ``acts_on_import``) counts for whatever imports the module;
- a function that calls ``globals``, ``eval`` or ``exec`` reaches all of its own module;
- where ``__subclasses__`` is used, every derived class of the imported modules counts.

A module that is imported by a computed name (``importlib.import_module``) cannot be followed, unless a string begins
that name: a contract test holds the list of such calls.

What importing a module executes of a definition: decorators, default values, class bodies and assigned values.

Most of them only build the function, class or value that the statement names. Some act beyond that, such as a decorator
that enters a function in a table; those count for every stage that imports the module, whether or not it uses the name.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlhf_core.fingerprint.modules import (
    Definition,
    Import,
    Module,
    Names,
    dotted_name,
    imports_in,
    is_string,
    packages_of,
    targets_executed,
)

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
    """Encode the syntax tree of ``definition``, whose names mean what ``names`` says, with each reference for a name.

    A reference is written as the name of what it leads to, however the module was imported, and imports inside
    functions are left out. So a definition that moves to another module stays what it was, and so do those that use it.
    The encoding names fields and leaves out empty ones, so that it is the same for every version of Python that parses
    the code alike.
    """
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


Function = (ast.FunctionDef, ast.AsyncFunctionDef)
# Statements of a class body that only declare a member.
DECLARATIONS = (*Function, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Pass)
CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "__set_name__", "model_post_init")
# The definitions of the package that a dotted name stands for in a module; None for a name from elsewhere.
Resolve = Callable[[str, tuple[str, ...]], "Sequence[Definition] | None"]


def acts_on_import(statement: ast.stmt, module: str, resolve: Resolve) -> bool:
    """Whether executing a definition of ``module`` may change something beside the name that it binds.

    That is so when it calls a function of the package, a method of one of its objects, or a class of it whose
    constructor does; when a decorator is of the package; when it calls something whose name says that it registers; and
    for a class with a metaclass or an inherited ``__init_subclass__`` of the package, or whose body does more than
    declare members.
    """
    if isinstance(statement, ast.ClassDef) and (
        not all(isinstance(inner, DECLARATIONS) or is_string(inner) for inner in statement.body)
        or _watched(statement, module, resolve)
    ):
        return True
    decorators = [dotted_name(decorator) for decorator in decorators_of(statement)]
    if any(resolve(module, name) is not None or _registers(name) for name in decorators):
        return True
    return any(_may_act(call, module, resolve) for part in executed_parts(statement) for call in calls_in(part))


def _may_act(callee: ast.expr, module: str, resolve: Resolve) -> bool:
    """Whether calling ``callee`` may do more than build a value."""
    name = dotted_name(callee)
    if not name:
        names = [node.id for node in ast.walk(callee) if isinstance(node, ast.Name)]
        return any(resolve(module, (used,)) is not None for used in names)
    definitions = resolve(module, name)
    if definitions is None:
        return _registers(name)
    return any(
        not isinstance(s, ast.ClassDef) or name[-1] != made.name or _constructor_acts(s, made.module, resolve)
        for made in definitions
        for s in made.statements
    )


def _registers(name: tuple[str, ...]) -> bool:
    return bool(name) and "register" in name[-1]


def _constructor_acts(statement: ast.stmt, module: str, resolve: Resolve) -> bool:
    """Whether a class's constructor, its own or an inherited one, uses anything of the package but classes."""
    if not isinstance(statement, ast.ClassDef):
        return False
    constructors = [m for m in statement.body if isinstance(m, Function) and m.name in CONSTRUCTORS]
    nodes = [node for constructor in constructors for node in ast.walk(constructor)]
    for node in nodes:
        used = resolve(module, dotted_name(node)) if isinstance(node, ast.Name | ast.Attribute) else None
        if any(not isinstance(s, ast.ClassDef) for definition in used or () for s in definition.statements):
            return True
    return any(_constructor_acts(s, above.module, resolve) for s, above in _bases(statement, module, resolve))


def _watched(statement: ast.ClassDef, module: str, resolve: Resolve) -> bool:
    """Whether code of the package runs when a class is made: a metaclass, or ``__init_subclass__`` of a base."""
    if any(k.arg == "metaclass" and resolve(module, dotted_name(k.value)) is not None for k in statement.keywords):
        return True
    for base, above in _bases(statement, module, resolve):
        members = {member.name for member in base.body if isinstance(member, Function)}
        if "__init_subclass__" in members or _watched(base, above.module, resolve):
            return True
    return False


def _bases(statement: ast.ClassDef, module: str, resolve: Resolve) -> Iterator[tuple[ast.ClassDef, Definition]]:
    """The classes of the package that a class is derived from."""
    for base in statement.bases:
        name = dotted_name(base.value if isinstance(base, ast.Subscript) else base)
        for definition in resolve(module, name) or ():
            yield from ((s, definition) for s in definition.statements if isinstance(s, ast.ClassDef))


def executed_parts(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions that a function definition, a class body or an assignment evaluates; decorators apart."""
    if isinstance(statement, Function):
        yield from statement.args.defaults
        yield from (default for default in statement.args.kw_defaults if default is not None)
    elif isinstance(statement, ast.ClassDef):
        yield from statement.bases
        yield from (keyword.value for keyword in statement.keywords)
        for inner in statement.body:
            yield from executed_parts(inner)
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value is not None:
        yield statement.value


def decorators_of(statement: ast.stmt) -> Iterator[ast.expr]:
    """The decorators of a function, or of a class and of its members; of ``@f(x)`` it is ``f``."""
    if isinstance(statement, (*Function, ast.ClassDef)):
        for decorator in statement.decorator_list:
            yield decorator.func if isinstance(decorator, ast.Call) else decorator
        for inner in statement.body if isinstance(statement, ast.ClassDef) else ():
            yield from decorators_of(inner)


def calls_in(node: ast.AST) -> Iterator[ast.expr]:
    """What is called when ``node`` is evaluated; the body of a lambda is not."""
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call):
        yield node.func
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child)


# Definitions that agree in text and, this many references deep, in all that they lead to are taken to be the same.
DEPTH = 4
NO_DATA = frozenset({".py", ".pyc", ".pyi", ".typed"})


class Package:
    """The package ``name``, whose folder lies in ``root``; ``neutral`` modules and what they import do not count."""

    def __init__(self, root: Path, name: str, neutral: Collection[str] = ()) -> None:
        self.names = Names(root, name, neutral)
        self._encode: Callable[[Definition], Encoded] = cache(lambda definition: encode(definition, self.names))
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
