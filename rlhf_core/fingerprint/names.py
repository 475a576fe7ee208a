"""What names mean in the modules of a package, followed through imports, attributes and strings to definitions.

Where a name does not say enough, more is taken than may be needed:

- a module used as a value (``getattr(module, name)``), or an attribute that it does not define, stands for all that the
  module defines, and a package used so for all modules in it;
- a string that names a module of the package, or begins such a name (an entry point, a table of lazy imports), stands
  for all that the module defines.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.fingerprint.modules import Definition, Import, Module

OF_EVERY_MODULE = re.compile(r"__(name|file|doc|path|package|spec)__")


@dataclass
class Reach:
    """What a dotted name leads to: ``definitions``, after which ``rest`` of its attributes are left.

    ``inside`` is false for a name from outside the package. Of neutral modules there are no definitions.
    """

    definitions: list[Definition] = field(default_factory=list)
    rest: tuple[str, ...] = ()
    inside: bool = True


class Names:
    """The modules of package ``name``, whose folder lies in ``root``; names lead to nothing in ``neutral`` ones."""

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

    def resolve(self, module_name: str, name: tuple[str, ...]) -> list[Definition] | None:
        """The definitions that ``name`` stands for in a module; None when there are none."""
        module = self.module(module_name)
        return (self.reach_name(module, name).definitions or None) if module is not None and name else None

    def reach_name(self, module: Module, name: tuple[str, ...]) -> Reach:
        """What a dotted name means at the top level of ``module``."""
        first, rest = name[0], name[1:]
        own = module.definitions.get(first)
        imported = [self.reach(target, rest) for target in module.imports.get(first, ())]
        if own is None and not imported:
            stars = [reach for star in module.stars if (reach := self._bound(star, name)) is not None]
            return stars[0] if stars else Reach(inside=False, rest=rest)
        if own is None and len(imported) == 1:
            return imported[0]
        definitions = [definition for reach in imported for definition in reach.definitions]
        return Reach([*([own] if own is not None else []), *definitions], rest)

    def reach(self, target: Import, attributes: tuple[str, ...]) -> Reach:
        """What ``attributes`` of an imported module or name lead to."""
        return self._attribute(target.module, (target.name, *attributes) if target.name is not None else attributes)

    def reach_text(self, text: str) -> list[Definition]:
        """The definitions of the modules that a string names, wholly or in part."""
        if not text.startswith(f"{self.name}.") or not re.fullmatch(r"[\w.]+(:\w+)?", text):
            return []
        name, _, attribute = text.partition(":")
        if name.endswith("."):
            return self._all_below(name.rstrip("."))
        if self.module(name) is not None:
            return self.reach(Import(name, attribute or None), ()).definitions
        parent, _, last = name.rpartition(".")
        return self.reach(Import(parent, last), ()).definitions if self.module(parent) is not None else []

    def everything_in(self, module: Module) -> list[Definition]:
        """All that ``module`` defines, and the definitions that it imports by name."""
        if module.name in self.neutral:
            return []
        everything = [*module.definitions.values()]
        for target in (target for targets in module.imports.values() for target in targets):
            if target.name is not None and self.module(f"{target.module}.{target.name}") is None:
                everything += self._attribute(target.module, (target.name,)).definitions
        return everything

    def executed_by(self, imports: Iterable[Import]) -> Iterator[str]:
        """Modules of the package that imports execute: those named, the packages around them, and submodules."""
        for target in imports:
            if self.module(target.module) is not None:
                yield from packages_of(target.module)
                if target.name is not None and self.module(f"{target.module}.{target.name}") is not None:
                    yield f"{target.module}.{target.name}"

    def _attribute(self, module_name: str, attributes: tuple[str, ...]) -> Reach:
        """What a chain of attributes of a module leads to."""
        module = self.module(module_name)
        if module is None:
            return Reach(inside=False, rest=attributes)
        if module_name in self.neutral:
            return Reach(rest=attributes[1:])
        if not attributes:
            return Reach(self._all_below(module_name) if module.is_package else self.everything_in(module))
        bound = self._bound(module_name, attributes)
        if bound is not None:
            return bound
        if self.module(f"{module_name}.{attributes[0]}") is not None:
            return self._attribute(f"{module_name}.{attributes[0]}", attributes[1:])
        if OF_EVERY_MODULE.fullmatch(attributes[0]):
            return Reach(rest=attributes)
        return Reach(self.everything_in(module), attributes)

    def _bound(self, module_name: str, name: tuple[str, ...]) -> Reach | None:
        """What ``name`` means in a module that binds it; None when it does not."""
        module = self.module(module_name)
        if module is None or (name[0] not in module.definitions and name[0] not in module.imports):
            return None
        return self.reach_name(module, name)

    def _all_below(self, package: str) -> list[Definition]:
        everything = []
        for path in sorted(self.root.joinpath(*package.split(".")).rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            module = self.module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            everything += self.everything_in(module) if module is not None else []
        return everything


def packages_of(module: str) -> list[str]:
    """``a.b.c``, ``a.b`` and ``a``: what importing ``a.b.c`` executes."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
