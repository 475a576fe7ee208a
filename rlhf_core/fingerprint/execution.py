"""What importing a module executes of a definition: decorators, default values, class bodies and assigned values.

Most of them only build the function, class or value that the statement names. Some act beyond that, such as a decorator
that enters a function in a table; those count for every stage that imports the module, whether or not it uses the name.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from rlhf_core.fingerprint.modules import Definition
from rlhf_core.fingerprint.syntax import dotted_name, is_string

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
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
        not all(_declares(inner) for inner in statement.body) or _watched(statement, module, resolve)
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
    made = [(s, definition) for definition in definitions for s in definition.statements]
    if not all(isinstance(s, ast.ClassDef) and name[-1] == definition.name for s, definition in made):
        return True
    return any(_constructor_acts(s, definition.module, resolve) for s, definition in made)


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


def _declares(statement: ast.stmt) -> bool:
    """Whether a statement of a class body only declares a member."""
    declarations = (*Function, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Pass)
    return isinstance(statement, declarations) or is_string(statement)


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
