"""What is built can be installed where nothing else is, and does what the README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
FIRST_PARAGRAPH = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1]

pytestmark = pytest.mark.slow


def run(*command: str | Path, folder: Path, path: Path | None = None, check: bool = True) -> tuple[int, str, str]:
    """Exit code, output and error of a command in a folder, whose imports see `path` and no other."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it and not from the repository."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, folder=out)
    (archive,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def unpacked(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in the source archive."""
    target = tmp_path_factory.mktemp("source")
    with tarfile.open(built[0]) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4 has none
        archive.extractall(target, **safely)
    (folder,) = target.iterdir()
    return folder


def needed(requirements: list[str]) -> set[str]:
    """The distributions behind these requirements and behind theirs, without any extra."""
    names: set[str] = set()
    waiting = list(map(Requirement, requirements))
    while waiting:
        requirement = waiting.pop()
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in names:
            names.add(requirement.name)
            waiting += map(Requirement, distribution(requirement.name).requires or [])
    return names


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment's programs: our wheel, and of all packages here only those that it says it needs.

    They are linked rather than installed again, which would need a network and minutes.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    programs = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    run(*pip, "install", "--no-deps", "--no-index", built[1], folder=folder)
    _, where, _ = run(
        programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder
    )
    site = Path(where.strip())
    (metadata,) = site.glob("blockadapt-*.dist-info/METADATA")
    declared = re.findall(r"^Requires-Dist: (.+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    here = Path(sysconfig.get_path("purelib"))
    for name in needed(declared):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (site / top).symlink_to(here / top)
    return programs


def test_the_readmes_examples_run_where_only_the_wheel_and_its_dependencies_are(
    installed: Path, tmp_path: Path
) -> None:
    fences = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(fences) >= 4
    script = tmp_path / "quickstart.py"
    fast = "BlockAdam(model.parameters(), backend='numba')"  # 'auto' would do without
    tail = f"{fast}\nimport blockadapt, sys\nprint(blockadapt.__file__, 'typer' in sys.modules)\n"
    script.write_text("\n".join([*fences, tail]), encoding="utf-8")
    _, out, _ = run(installed / "python", script, folder=tmp_path)
    where, laboratory = out.splitlines()[-1].split()
    assert Path(where).is_relative_to(installed.parent)
    assert laboratory == "False"


def test_the_readme_of_the_package_has_no_link_that_only_the_repository_knows(installed: Path) -> None:
    (metadata,) = installed.parent.glob("lib/python*/site-packages/blockadapt-*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert "Description-Content-Type: text/markdown" in text
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert FIRST_PARAGRAPH in prose
    assert re.findall(r"\]\((?![a-z]+:|#)[^)]*\)", prose) == []


def test_the_command_says_in_one_sentence_which_extra_it_needs(installed: Path, tmp_path: Path) -> None:
    code, out, error = run(installed / "blockadapt", "list", folder=tmp_path, check=False)
    assert code == 2
    assert out == ""
    sentence = r'blockadapt: this command needs \w+; install it with pip install "blockadapt\[experiments\]"\.\n'
    assert re.fullmatch(sentence, error)


def test_the_command_compiles_where_only_the_library_is(installed: Path, tmp_path: Path) -> None:
    _, out, _ = run(installed / "blockadapt", "compile", folder=tmp_path)
    assert [line.partition(":")[0] for line in out.splitlines()] == ["float32", "float64"]


def test_the_laboratory_in_the_wheel_has_its_files(installed: Path, tmp_path: Path) -> None:
    """With every package of this environment in reach, the installed command finds its configurations."""
    everything = Path(sysconfig.get_path("purelib"))
    (site,) = (installed.parent / "lib").glob("python*/site-packages")
    code = "from blockadapt_experiments import __main__ as command; print(command.__file__); command.main()"
    search = f"{site}{os.pathsep}{everything}"
    _, out, _ = run(sys.executable, "-c", code, "list", folder=tmp_path, path=Path(search))
    assert Path(out.splitlines()[0]).is_relative_to(site)
    assert "mnist-lenet300" in out
    assert (site / "blockadapt" / "py.typed").exists()


def test_the_source_archive_holds_what_its_tests_need(unpacked: Path) -> None:
    """Every test is collected, and those that read other files of the repository pass."""
    for name in (
        "Makefile",
        "mkdocs.yml",
        "constraints.txt",
        "conftest.py",
        "examples",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ):
        assert (unpacked / name).exists()
    pytest_here = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    _, collected, _ = run(*pytest_here, "--collect-only", folder=unpacked, path=unpacked / "src")
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert ours <= {line.partition("::")[0] for line in collected.splitlines()}
    chosen = ("tests/test_docs.py", "tests/library/test_public_api.py", "tests/library/test_parameter_groups.py")
    run(*pytest_here, *chosen, folder=unpacked, path=unpacked / "src")
