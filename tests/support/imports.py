"""Who imports whom, read from the sources; imports inside functions and under TYPE_CHECKING count like all others."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def modules(package: Path) -> dict[str, Path]:
    """The files of a package by the names of their modules."""
    return {_dotted(package, path): path for path in sorted(package.rglob("*.py"))}


def imported_names(package: Path, path: Path) -> Iterator[str]:
    """All that a file of the package imports, dotted: `from a import b` is a.b, whether b is a module or not."""
    module = _dotted(package, path)
    above = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = above[: len(above) + 1 - node.level] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def import_graph(package: Path) -> dict[str, set[str]]:
    """For each module of a package the others of the package that it imports."""
    known = modules(package)
    return {
        module: {_module_of(name, known) for name in imported_names(package, path)} - {"", module}
        for module, path in known.items()
    }


def folder_graph(package: Path) -> dict[str, set[str]]:
    """The same for the folders of the package: what lies directly in it is left out."""
    folders: dict[str, set[str]] = {}
    for module, others in import_graph(package).items():
        folder = _folder_of(package, module)
        if folder:
            folders.setdefault(folder, set()).update(_folder_of(package, other) for other in others)
    return {folder: others - {"", folder} for folder, others in folders.items()}


def find_cycle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Names of which each is imported by the next, the first and the last alike; empty if there is no cycle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _dotted(package: Path, path: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module_of(name: str, known: Mapping[str, Path]) -> str:
    """The module that this name is or lies in; "" if it is none of these."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def _folder_of(package: Path, module: str) -> str:
    first = module.split(".")[1:2]
    return first[0] if first and (package / first[0]).is_dir() else ""
