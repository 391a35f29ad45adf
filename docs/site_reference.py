"""The API reference: the names that `api.md` lists, held to what the packages promise and to what is documented.

The site's build asks `faults`, and so do the tests. A class, a function or a constant must say in the sources what it
is: Python gives dataclasses and tuples words that nobody wrote.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

PUBLIC_MODULES = ("blockadapt", "blockadapt.kernels", "blockadapt.diagnostics", "blockadapt_experiments")
"""Modules whose `__all__` is what we promise."""

ENTRY = re.compile(r"^- `(blockadapt[\w.]*)`.*$", re.MULTILINE)
"""A line of the page that lists a name."""


def faults(page: str) -> list[str]:
    """Say what is wrong with the reference, a sentence each: names left out, listed twice, not there, undocumented."""
    listed = ENTRY.findall(page)
    missing = [name for name in dict.fromkeys(listed) if not _is_there(name)]
    there = [name for name in dict.fromkeys(listed) if name not in missing]
    things = {id(found(name)) for name in there}
    promised = [f"{module}.{name}" for module in PUBLIC_MODULES for name in importlib.import_module(module).__all__]
    return [
        *(f"api.md lists {name} twice." for name in dict.fromkeys(listed) if listed.count(name) > 1),
        *(f"api.md lists {name}, which is not there." for name in missing),
        *(f"api.md does not list {name}, which is public." for name in promised if id(found(name)) not in things),
        *(f"{member} has no documentation." for name in there for member in undocumented(name)),
    ]


def found(name: str) -> Any:
    """Give the object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        return importlib.import_module(name)


def _is_there(name: str) -> bool:
    try:
        found(name)
    except ImportError:
        return False
    return True


def place(name: str) -> str:
    """Give the name under which the sources have an object: the laboratory loads its own when they are asked for."""
    module, _, attribute = name.rpartition(".")
    later = getattr(importlib.import_module(module), "_PLACES", {})
    return f"{module}.{later[attribute]}.{attribute}" if attribute in later else name


def undocumented(name: str) -> Iterator[str]:
    """Find what of a name and its public members says nothing about itself. A member may inherit its words.

    Yields:
        A dotted name.
    """
    thing = found(name)
    if not (thing.__doc__ if inspect.ismodule(thing) else _words(*place(name).rpartition(".")[::2])):
        yield name
    members = vars(thing) if inspect.isclass(thing) or inspect.ismodule(thing) else {}
    for member, value in members.items():
        ours = isinstance(value, property) or getattr(value, "__module__", "").startswith(name.partition(".")[0])
        if ours and not member.startswith("_") and not inspect.getdoc(getattr(thing, member)):
            yield f"{name}.{member}"


def _words(module: str, name: str) -> str | None:
    """Read a docstring in the sources of a module, or the string after an assignment; imports are followed."""
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for statement, after in zip(body, [*body[1:], None], strict=True):
        match statement:
            case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined) if defined == name:
                return ast.get_docstring(statement)
            case ast.Assign(targets=[ast.Name(id=assigned)]) | ast.AnnAssign(target=ast.Name(id=assigned)) if (
                assigned == name
            ):
                literal = after.value if isinstance(after, ast.Expr) else None
                return literal.value if isinstance(literal, ast.Constant) and isinstance(literal.value, str) else None
            case ast.ImportFrom(module=str(source), names=names):
                for alias in names:
                    if (alias.asname or alias.name) == name:
                        return _words(source, alias.name)
    return None
