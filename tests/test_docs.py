"""What the documents say is true: their examples run, their links lead somewhere, their commands exist."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blockadapt import plan
from support.parts import nothing_registered

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(RESULTS.glob("*.md"))]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def fenced(document: Path, *languages: str) -> list[tuple[int, str]]:
    """Line number and text of every fenced piece in one of these languages."""
    text = document.read_text(encoding="utf-8")
    return [
        (text[: match.start()].count("\n") + 2, match[2]) for match in FENCE.finditer(text) if match[1] in languages
    ]


def prose(document: Path) -> str:
    """The document without its fenced pieces."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def anchors(document: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: Path) -> list[str]:
    return [first or second for first, second in LINK.findall(prose(document))]


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", text, re.MULTILINE))


def shell(document: Path) -> str:
    """All that a reader could type into a shell: fenced shell and code in the text."""
    spans = re.findall(r"`([^`\n]+)`", prose(document))
    return "\n".join([*(text for _, text in fenced(document, "sh", "bash", "shell", "console")), *spans])


@each_document
def test_the_python_examples_run_in_order(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # a reader is in the checkout
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with nothing_registered():
        for line, source in fenced(document, "python", "py"):
            code = compile("\n" * (line - 1) + source, str(document), "exec")  # so that a traceback names the line
            exec(code, namespace)


def test_the_readmes_first_example_trains_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = fenced(ROOT / "README.md", "python")
    assert len(examples) >= 4
    first = examples[0][1]
    assert "range(20)" in first

    def loss(source: str) -> float:
        namespace: dict[str, Any] = {}
        torch.manual_seed(0)
        exec(source, namespace)
        return nn.functional.cross_entropy(namespace["model"](namespace["x"]), namespace["y"]).item()

    assert loss(first) < loss(first.replace("range(20)", "range(0)")) - 0.05


@each_document
def test_every_relative_link_leads_to_a_file_and_every_anchor_to_a_heading(document: Path) -> None:
    broken = []
    for link in links(document):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_readme_links_to_every_document() -> None:
    pages = (ROOT / "README.md", RESULTS / "README.md")  # which links to every result
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in pages for link in links(page)}
    assert {path for path in DOCUMENTS[1:] if path.resolve() not in linked} == set()


@each_document
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", shell(document)))
    assert named - make_targets() == set()


def test_the_readme_names_the_two_commands_of_a_fresh_machine() -> None:
    named = set(re.findall(r"^make ([a-z][\w-]*)", shell(ROOT / "README.md"), re.MULTILINE))
    assert {"demo", "test"} <= named


@each_document
def test_every_command_of_the_tool_that_is_named_exists(document: Path) -> None:
    cli = pytest.importorskip("blockadapt_experiments.commands.cli")
    commands = {command.name or command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands}
    assert "demo" in commands
    named = set(re.findall(r"^\s*(?:\$ )?blockadapt ([a-z][\w-]*)", shell(document), re.MULTILINE))
    assert named - commands == set()


@each_document
def test_no_placeholder_is_left(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert re.findall(r"^[A-Z]+_[A-Z_]+$|\bTODO\b|\bFIXME\b|\bTBD\b", text, re.MULTILINE) == []


# The API reference -------------------------------------------------------------------------------------------------

PUBLIC_MODULES = ("blockadapt", "blockadapt.kernels", "blockadapt.diagnostics")
"""Modules whose `__all__` is what we promise."""


def api_names() -> list[str]:
    """Every name that the page of the API lists; the site puts its documentation there."""
    return re.findall(r"^- `(blockadapt[\w.]*)`", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)


def found(name: str) -> Any:
    """The object of a dotted name."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        return importlib.import_module(name)


def undocumented(name: str, thing: Any) -> Iterator[str]:
    """The name and its public members, as far as they say nothing about themselves."""
    if not (thing.__doc__ if inspect.isclass(thing) else inspect.getdoc(thing)):
        yield name
    members = vars(thing) if inspect.isclass(thing) or inspect.ismodule(thing) else {}
    for member, value in members.items():
        ours = isinstance(value, property) or getattr(value, "__module__", "").startswith("blockadapt")
        if ours and not member.startswith("_") and not inspect.getdoc(getattr(thing, member)):
            yield f"{name}.{member}"


def test_every_public_name_is_in_the_reference_once() -> None:
    listed = api_names()
    assert len(listed) == len(set(listed))
    things = {id(found(name)) for name in listed}
    promised = [(module, name) for module in PUBLIC_MODULES for name in importlib.import_module(module).__all__]
    assert [f"{module}.{name}" for module, name in promised if id(found(f"{module}.{name}")) not in things] == []


@pytest.mark.parametrize("name", api_names())
def test_a_name_in_the_reference_is_there_and_documented(name: str) -> None:
    assert list(undocumented(name, found(name))) == []


def test_what_says_nothing_about_itself_is_noticed() -> None:
    class Silent(nn.Module):
        def said(self) -> None:
            """Something."""

        def unsaid(self) -> None:
            pass

    Silent.unsaid.__module__ = "blockadapt.somewhere"
    assert list(undocumented("Silent", Silent)) == ["Silent", "Silent.unsaid"]


def test_the_readme_for_a_package_index_has_no_relative_link() -> None:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "![a](docs/a.gif) [b](docs/b.md#c) [d](#d) [e](https://e.org)\n```md\n[f](g)\n```\n"
    assert module.for_index(text, None, "1.2.3") == " b [d](#d) [e](https://e.org)\n```md\n[f](g)\n```\n"
    site = "https://example.org/x"
    there = f"![a]({site}/raw/v1.2.3/docs/a.gif) [b]({site}/blob/v1.2.3/docs/b.md#c) [d](#d) [e](https://e.org)\n"
    assert module.for_index(text, site, "1.2.3") == there + "```md\n[f](g)\n```\n"


# What many processes cost ------------------------------------------------------------------------------------------


def figure(cell: str) -> float:
    """The number in a cell of a table, with its unit."""
    units = {"": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "GFLOP": 1e9, "%": 0.01}
    (number, unit), *_ = re.findall(r"([\d.]+) ?(\w*%?)$", cell)
    return float(number) * units[unit]


def test_the_costs_of_many_processes_are_those_of_the_plan() -> None:
    document = ROOT / "docs" / "distributed.md"
    namespace: dict[str, Any] = {"torch": torch, "nn": nn, "plan": plan}
    (source,) = [text for _, text in fenced(document, "python") if "meta" in text]
    exec(compile(source, str(document), "exec"), namespace)
    model = nn.Sequential(*namespace["parts"])
    size = 4 * sum(param.numel() for param in model.parameters())
    lines = [line.strip("| ").split(" | ") for line in prose(document).splitlines() if line.count("|") == 7]
    cells = {label: row for label, _, *row in (line for line in lines if len(line) == 6)}
    assert f"{size / 4e9:.2f} billion" in prose(document)
    for column, ranks in enumerate((1, 8, 64, 1024)):
        planned = plan(model, ranks=ranks)
        largest, even = max(planned.rank_bytes), planned.state_bytes / ranks
        received = size * (ranks - 1) / ranks
        expected = {
            "state, largest rank": largest,
            "arithmetic of a step": planned.flops / ranks,
            "`process_group=`: received in a step": received,
            "`process_group=`: second copy": size,
            "DDP: gradients received in a step": 2 * received,
            "FSDP2: received by the optimizer": 24 * (ranks > 1),
        }
        for label, value in expected.items():
            assert figure(cells[label][column]) == pytest.approx(value, rel=0.02), (label, ranks)
        above = figure(cells["above an even share"][column])
        assert above == pytest.approx(largest / even - 1, rel=0.15)  # one digit
