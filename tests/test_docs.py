"""What the documents say is true: their examples run, their links lead somewhere, their commands exist."""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from site_reference import PUBLIC_MODULES, faults, undocumented
from torch import nn

from blockadapt import plan
from support.parts import nothing_registered

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
ASIDE = [ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
DOCUMENTS = [ROOT / "README.md", *ASIDE, *sorted((ROOT / "docs").glob("*.md")), *sorted(RESULTS.glob("*.md"))]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def fenced(document: Path, *languages: str) -> list[tuple[int, str]]:
    """Line number and text of every fenced piece in one of these languages."""
    text = document.read_text(encoding="utf-8")
    return [
        (text[: match.start()].count("\n") + 2, match[2]) for match in FENCE.finditer(text) if match[1] in languages
    ]


def after(document: Path, line: int, text: str) -> str:
    """The document from the end of a fenced piece on."""
    return "".join(document.read_text(encoding="utf-8").splitlines(keepends=True)[line - 1 + text.count("\n") :])


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
    fences = (text.replace("\\\n", " ") for _, text in fenced(document, "sh", "bash", "shell", "console"))
    spans = (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose(document)))
    return "\n".join([*fences, *spans])


@each_document
def test_the_python_examples_run_in_order(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # a reader is in the checkout
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with nothing_registered():
        for line, source in fenced(document, "python", "py"):
            code = compile("\n" * (line - 1) + source, str(document), "exec")  # so that a traceback names the line
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(code, namespace)
            shown = re.match(r"```\n+```text\n(.*?)^```$", after(document, line, source), re.MULTILINE | re.DOTALL)
            assert shown is None or shown[1] == printed.getvalue()


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


def test_the_sites_menu_has_every_page() -> None:
    """The build is strict: it fails on a page that nobody finds."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r"([\w./-]+\.md)$", menu, re.MULTILINE)
    there = [path.relative_to(ROOT / "docs").as_posix() for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")]
    assert sorted(pages) == sorted([*there, "index.md", "contributing.md", "changelog.md", "examples.md"])


def test_the_examples_page_has_a_row_for_every_example() -> None:
    page = ROOT / "examples" / "README.md"
    rows = re.findall(r"^\| \[[^\]]*\]\(([^)]+)\) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(path.relative_to(page.parent).as_posix() for path in page.parent.rglob("*.py"))


@each_document
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", shell(document)))
    assert named - make_targets() == set()


def test_the_readme_names_the_two_commands_of_a_fresh_machine() -> None:
    named = set(re.findall(r"^make ([a-z][\w-]*)", shell(ROOT / "README.md"), re.MULTILINE))
    assert {"demo", "test"} <= named


@each_document
def test_every_command_of_the_tool_is_one_that_the_laboratory_takes(
    document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options are read and its settings made, and nothing is run. In the text, `blockadapt run` alone is a name."""
    pytest.importorskip("typer", reason="needs the `experiments` extra")
    from support import typed_commands

    monkeypatch.chdir(ROOT)  # a reader is in the checkout
    names = set(re.findall(r"`blockadapt ([a-z][\w-]*)`", prose(document)))
    assert names <= typed_commands.COMMANDS
    for line in re.findall(r"^\s*(?:\$ )?(blockadapt [a-z].*)", shell(document), re.MULTILINE):
        if line not in {f"blockadapt {name}" for name in names}:
            with nothing_registered():
                typed_commands.parse(line)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("blockadapt walk", "No such command"),
        ("blockadapt run", "(?i)missing parameter"),
        ("blockadapt run mnist-lenet300 --sclae smoke", "No such option"),
        ("blockadapt report", "(?i)missing parameter"),
        ("blockadapt list --settings mnist-lenet", "no experiment"),
        ("blockadapt run mnist-lenet", "no experiment"),
        ("blockadapt run mnist-lenet300 --scale large", "`scale` must be"),
        ("blockadapt run mnist-lenet300 --set optimizer.blocksize=2", "blocksize"),
        ("blockadapt plan mnist-lenet300 --set optimizer.blocksize=2", "blocksize"),
        ("blockadapt run mnist-lenet300 --optimizers adm", "'adm'"),
        ("blockadapt run mnist-lenet300 --arm b25=block-adam,blocksize=25", "blocksize"),
        ("blockadapt run mnist-lenet300 --tune --tune-over beta2=0.999:0.9", "`tune_over` must be"),
        ("blockadapt run mnist-lenet300 --tune-over beta2=0.9:0.999", "together with --tune"),
        ("blockadapt run toy-landscape --tune", "no learning rate to tune"),
        ("blockadapt run mnist-lenet300 --seed one", "`seed` must be"),
        ("blockadapt run cifar10-cnn --set 'variants=[\"optimizer.blocksize=1\"]'", "blocksize"),
    ],
)
def test_a_command_that_the_laboratory_would_refuse_is_noticed(line: str, wrong: str) -> None:
    pytest.importorskip("typer", reason="needs the `experiments` extra")
    from support import typed_commands

    with pytest.raises(Exception, match=wrong):  # ValueError, or what typer has for wrong usage
        typed_commands.parse(line)


@each_document
def test_every_python_program_that_is_typed_is_there(document: Path) -> None:
    for module, path in re.findall(r"\bpython (?:-m ([\w.]+)|([\w./]+\.py))", shell(document)):
        assert importlib.util.find_spec(module) if module else (ROOT / path).is_file()


@each_document
def test_every_piece_of_toml_is_settings(document: Path) -> None:
    config = pytest.importorskip("blockadapt_experiments.core.config")
    from blockadapt_experiments.experiments.registry import get_experiment

    for _, text in fenced(document, "toml"):
        tables = config.tomllib.loads(text)
        assert tables.keys() <= {"defaults", *config.SCALES}
        for table in tables.values():
            settings = config.load(get_experiment("mnist-lenet300"), "laptop", [table])
            assert {*table.get("arms", ())} <= {*settings.optimizers}


@each_document
def test_no_placeholder_is_left(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert re.findall(r"^[A-Z]+_[A-Z_]+$|\bTODO\b|\bFIXME\b|\bTBD\b", text, re.MULTILINE) == []


# The API reference -------------------------------------------------------------------------------------------------

API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")

PLANTED = '''
from dataclasses import dataclass
from typing import NamedTuple

SAID = (1, 2)
"""Two numbers."""
UNSAID: dict[str, int] = {}
AGAIN = SAID


def silent() -> None:
    pass


@dataclass
class Silent:
    x: int


class Pair(NamedTuple):
    x: int


class Half:
    """Says something."""

    def said(self) -> None:
        """Something."""

    def unsaid(self) -> None:
        pass

    @property
    def quiet(self) -> int:
        return 0
'''
"""What Python gives words of its own to, though nobody wrote any, and what it does not."""


def test_the_reference_has_every_public_name_once_and_each_is_documented() -> None:
    assert faults(API) == []


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_a_public_name_that_the_reference_does_not_list_is_noticed(module: str) -> None:
    name = f"{module}.{importlib.import_module(module).__all__[0]}"
    without = re.sub(rf"^- `{re.escape(name)}`.*$", "", API, flags=re.MULTILINE)
    assert faults(without) == [f"api.md does not list {name}, which is public."]
    assert faults(API + f"\n- `{name}`: again") == [f"api.md lists {name} twice."]
    assert faults(API + f"\n- `{module}.nobody`: never was") == [f"api.md lists {module}.nobody, which is not there."]


def test_what_says_nothing_about_itself_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(PLANTED, encoding="utf-8")
    (tmp_path / "front.py").write_text("from planted import SAID, UNSAID as THERE, Half", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    silent = {name: list(undocumented(name)) for name in ("planted.silent", "planted.Silent", "planted.Pair")}
    assert silent == {name: [name] for name in silent}
    assert list(undocumented("planted.Half")) == ["planted.Half.unsaid", "planted.Half.quiet"]
    constants = ["planted.SAID", "planted.UNSAID", "planted.AGAIN", "front.SAID", "front.THERE"]
    said = [name for name in constants if not list(undocumented(name))]
    assert said == ["planted.SAID", "front.SAID"]


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


# The pictures ------------------------------------------------------------------------------------------------------


def test_the_interval_in_the_picture_closes_on_its_final_lr() -> None:
    picture = (ROOT / "docs" / "pictures" / "clipping.svg").read_text(encoding="utf-8")

    def points(name: str, height: float) -> list[tuple[float, float]]:
        """Where its path goes, y downwards from the top."""
        (path,) = re.findall(rf'<g id="{name}">.*?<path[^>]* d="([^"]*)"', picture, re.DOTALL)
        return [(float(x), float(y) % height) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]

    height = float(re.findall(r'viewBox="0 0 \S+ (\S+)"', picture)[0])  # a filled area counts from the bottom
    interval, ((_, level), _) = points("interval", height), points("final-lr", height)
    ends = [[y for x, y in interval if x == end(interval)[0]] for end in (min, max)]
    assert all(min(ys) < level < max(ys) for ys in ends)
    wide, narrow = (max(ys) - min(ys) for ys in ends)
    assert narrow < wide / 50


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
            "FSDP2: received by the optimizer": 8 * 4 * (ranks > 1),  # the numbers of a vote
        }
        for label, value in expected.items():
            assert figure(cells[label][column]) == pytest.approx(value, rel=0.02), (label, ranks)
        above = figure(cells["above an even share"][column])
        assert above == pytest.approx(largest / even - 1, rel=0.15)  # one digit
