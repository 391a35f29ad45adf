"""Imports go one way in both packages, and the laboratory knows only what the library shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.imports import find_cycle, folder_graph, import_graph, imported_names, modules

SOURCES = Path(__file__).parent.parent / "src"
LIBRARY, LABORATORY = SOURCES / "blockadapt", SOURCES / "blockadapt_experiments"


@pytest.mark.parametrize("package", [LIBRARY, LABORATORY], ids=lambda path: path.name)
def test_no_import_leads_back_to_where_it_came_from(package: Path) -> None:
    graph = import_graph(package)
    assert any(graph.values())
    assert find_cycle(graph) == []


def documented() -> dict[str, set[str]]:
    """The laboratory's folders and their files, in the order of the table in docs/architecture.md."""
    text = (SOURCES.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for folder, files in re.findall(
        r"^\| (?:`(\w+)/`)? ?\| (`[^|]+) \|", text.partition("## The laboratory")[2], re.MULTILINE
    ):
        found.setdefault(folder or [*found][-1], set()).update(re.findall(r"`(\w+)/?`", files))
    return found


def test_the_laboratorys_folders_import_from_those_below_them_in_the_documents_table() -> None:
    order, graph = [*documented()], folder_graph(LABORATORY)
    assert set(order) == graph.keys()
    upwards = [
        (user, used) for user, others in graph.items() for used in others if order.index(user) > order.index(used)
    ]
    assert upwards == []


def test_the_documents_table_has_every_file_of_the_laboratory() -> None:
    inside = {folder: {path.stem for path in (LABORATORY / folder).iterdir()} for folder in documented()}
    aside = {"__init__", "__pycache__", "assets"}
    assert documented() == {folder: names - aside for folder, names in inside.items()}


@pytest.mark.parametrize(
    "planted",
    [
        "from planted.inner.low import x",
        "import planted.inner.low",
        "from planted.inner import low",
        "from .inner.low import x",
        "def f():\n    from planted.inner.low import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.inner.low import x",
    ],
)
def test_a_planted_cycle_is_seen(tmp_path: Path, planted: str) -> None:
    package = tmp_path / "planted"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from planted.inner.low import x", encoding="utf-8")
    (package / "inner" / "__init__.py").write_text("", encoding="utf-8")
    (package / "inner" / "low.py").write_text("from ..high import y\nx = y", encoding="utf-8")
    high = package / "high.py"
    high.write_text("import json\ny = json", encoding="utf-8")
    assert find_cycle(import_graph(package)) == []
    high.write_text(f"{planted}\ny = 1", encoding="utf-8")
    assert set(find_cycle(import_graph(package))) == {"planted.high", "planted.inner.low"}


def test_an_import_between_folders_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "planted"
    for name, text in (("a/one", "from planted.b.one import x"), ("b/one", "import planted.top"), ("top", "")):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert folder_graph(package) == {"a": {"b"}, "b": set()}


# What is private ------------------------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(library: Path) -> set[str]:
    """All names with an underscore that the library defines: functions, classes, variables and attributes."""
    found: set[str] = set()
    for path in modules(library).values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return set(filter(is_private, found))


def trespasses(user: Path, library: Path) -> Iterator[str]:
    """Where a package imports something private of the library, or reaches for it on an object not its own."""
    private = private_names(library)
    for module, path in modules(user).items():
        for name in imported_names(user, path):
            first, *rest = name.split(".")
            if first == library.name and any(map(is_private, rest)):
                yield f"{module} imports {name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            if isinstance(node, ast.Attribute) and node.attr in private and not own:
                yield f"{module}, line {node.lineno}, reaches for {node.attr}"


def test_the_laboratory_uses_nothing_private_of_the_library() -> None:
    assert len(private_names(LIBRARY)) > 20
    assert list(trespasses(LABORATORY, LIBRARY)) == []


@pytest.mark.parametrize(
    "planted",
    [
        "from lent._hidden import x",
        "import lent._hidden",
        "def f():\n    from lent import _hidden",
        "from lent.shown import _helper",
        "from lent.shown import Shown\nShown()._kernel",
        "import lent.shown\nlent.shown._helper()",
    ],
)
def test_a_planted_trespass_is_seen(tmp_path: Path, planted: str) -> None:
    lent, user = tmp_path / "lent", tmp_path / "user"
    for folder in (lent, user):
        folder.mkdir()
    shown = "def _helper(): ...\nclass Shown:\n    def __init__(self):\n        self._kernel = 1"
    (lent / "shown.py").write_text(shown, encoding="utf-8")
    (lent / "_hidden.py").write_text("x = 1", encoding="utf-8")
    (user / "it.py").write_text("from lent.shown import Shown\nShown().__class__", encoding="utf-8")
    assert list(trespasses(user, lent)) == []
    (user / "it.py").write_text(planted, encoding="utf-8")
    assert len(list(trespasses(user, lent))) == 1
