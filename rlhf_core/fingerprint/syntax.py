"""Syntax trees without what does not count: docstrings, comments and layout."""

from __future__ import annotations

import ast

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def bare_code(tree: ast.Module) -> bytes:
    """Serialise what the code of a module does. The docstrings are removed from ``tree`` itself."""
    drop_docstrings(tree)
    return ast.dump(tree, include_attributes=False).encode()


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
