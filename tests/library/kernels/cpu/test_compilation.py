"""Compiling: once for all processes, with one notice, wherever the cache may lie, and what works without Numba."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numba
import pytest
import torch
from numba.core import event

import blockadapt
from blockadapt.kernels import Coefficients, Descent, Place, Segment, get_kernel
from blockadapt.kernels.cpu import compilation
from blockadapt.kernels.eigh import EighKernel
from blockadapt.moments import FirstMoment, SecondMoment, packed_length
from blockadapt.spectrum import Spectrum

STEP = textwrap.dedent("""
    import sys
    import torch
    from blockadapt import BlockAdam
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(7, 40))
    optimizer = BlockAdam([param], backend=sys.argv[1] if len(sys.argv) > 1 else "numba")
    for _ in range(3):
        param.grad = torch.randn(7, 40)
        optimizer.step()
    import hashlib
    print(hashlib.sha256(param.detach().numpy().tobytes()).hexdigest())
""")
PATIENCE = 300


def environment(**changes: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    return {**own, **changes}


def start(script: str, *args: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process that has to succeed wrote to stdout and stderr."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out.strip(), err


def run(script: str, *args: str, **changes: str) -> tuple[str, str]:
    return finish(start(script, *args, **changes))


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder and its hash."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def sources() -> set[str]:
    """Compiled kernels that lie among the sources."""
    return {path.name for path in Path(blockadapt.__file__).parent.rglob("*.nb[ci]")}


# ----------------------------------------------------------------------------------------------------- compiling afresh


@pytest.mark.slow
def test_only_the_first_process_compiles_and_says_so_in_one_line(tmp_path: Path) -> None:
    first, notice = run(STEP, XDG_CACHE_HOME=str(tmp_path))
    assert notice == compilation.NOTICE.format(dtype="float32") + "\n"
    cached = contents(tmp_path)
    assert any(name.endswith(".nbc") for name in cached)
    second, silence = run(STEP, XDG_CACHE_HOME=str(tmp_path))
    assert silence == ""
    assert second == first
    assert contents(tmp_path) == cached


@pytest.mark.slow
def test_two_processes_that_start_at_once_share_one_compilation(tmp_path: Path) -> None:
    processes = [start(STEP, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    results = [finish(process) for process in processes]
    assert results[0][0] == results[1][0]
    assert sum(err.count("compiling") for _, err in results) == 1
    third, silence = run(STEP, XDG_CACHE_HOME=str(tmp_path))
    assert (third, silence) == (results[0][0], "")


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_made_costs_a_compilation_and_nothing_else(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    among_sources = sources()
    blocked_result, notice = run(STEP, XDG_CACHE_HOME=str(blocked))
    assert notice == compilation.NOTICE.format(dtype="float32") + "\n"
    assert blocked.read_text() == "not a folder"
    assert sources() == among_sources
    assert blocked_result == run(STEP, XDG_CACHE_HOME=str(tmp_path / "good"))[0]


@pytest.mark.slow
def test_the_users_numba_cache_is_where_the_kernel_goes(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    script = STEP + "import numba; print(numba.config.CACHE_DIR)"
    out, _ = run(script, NUMBA_CACHE_DIR=str(mine), XDG_CACHE_HOME=str(other))
    assert out.splitlines()[-1] == str(mine)
    assert any(name.endswith(".nbc") for name in contents(mine / "blockadapt"))
    assert not other.exists()


@pytest.mark.slow
def test_a_damaged_cache_is_compiled_again(tmp_path: Path) -> None:
    first, _ = run(STEP, XDG_CACHE_HOME=str(tmp_path))
    for path in tmp_path.rglob("*.nb[ci]"):
        path.write_bytes(path.read_bytes()[:100])
    second, _ = run(STEP, XDG_CACHE_HOME=str(tmp_path))
    assert second == first


# ------------------------------------------------------------------------------------------------------------ the cache


def step(n: int, dtype: torch.dtype) -> None:
    """One step of the fast kernel on a few blocks."""
    place = Place(
        n=n, x=torch.zeros(3, 1, n, dtype=dtype), m=None, largest=None, basis=None, eigenvalues=None,
        second_moment=torch.zeros(3, 1, packed_length(n), dtype=dtype),
    )  # fmt: skip
    coefficients = Coefficients(
        Descent(1.0, 0.0, 1.0), FirstMoment(0.0, 1.0), SecondMoment(0.9, 0.1, 1.0), Spectrum(1e-3, 1.0, 1e-4)
    )
    segment = Segment(place, torch.ones(3, 1, n, dtype=dtype), True, coefficients)
    for change in get_kernel("numba").prepare({place.batch: [segment]}):
        change.write_()
    assert (place.x != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_block_size_compiles_nothing(dtype: torch.dtype) -> None:
    step(3, dtype)
    with event.install_recorder("numba:run_pass") as recorder:
        for n in (1, 2, 4, 5, 17, 64):
            step(n, dtype)
        assert recorder.buffer == []
        numba.njit(lambda x: x + n)(1)
        assert recorder.buffer != []  # so the recorder would have seen it


def test_the_cache_lies_below_numbas_folder_if_the_user_has_set_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    assert compilation.cache_folder().parent == tmp_path / "numba" / "blockadapt"
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert compilation.cache_folder().parent == tmp_path / "xdg" / "blockadapt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert compilation.cache_folder().parent == tmp_path / ".cache" / "blockadapt"


def test_another_version_has_another_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {compilation.cache_folder()}
    for name, module in (("numba", compilation.numba), ("llvmlite", compilation.llvmlite)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "__version__", f"other {name}")
            folders.add(compilation.cache_folder())
    with monkeypatch.context() as patch:
        patch.setattr(compilation.sys, "version", "other Python")
        folders.add(compilation.cache_folder())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: b"other source")
        folders.add(compilation.cache_folder())
    assert len(folders) == 5


def test_compiling_leaves_the_users_cache_folder_as_it_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []

    def fake(function: object, cache: bool) -> str:
        seen.append((str(numba.config.CACHE_DIR), cache))
        if cache and len(seen) > 1:
            raise RuntimeError("cannot cache function")
        return "compiled"

    monkeypatch.setattr(compilation, "_c_function", fake)
    for before in ("", str(tmp_path / "mine")):
        monkeypatch.setattr(numba.config, "CACHE_DIR", before)
        assert compilation.compiled(lambda data: None, "float32") == "compiled"
        assert before == numba.config.CACHE_DIR
    assert [cache for _, cache in seen] == [True, True, True, False]
    assert Path(seen[0][0]).parent == tmp_path / "blockadapt"
    assert Path(seen[1][0]).parent == tmp_path / "mine" / "blockadapt"


def test_an_error_while_compiling_reaches_the_caller_and_frees_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")

    def failing(function: object, cache: bool) -> None:
        raise TypeError("does not compile")

    monkeypatch.setattr(compilation, "_c_function", failing)
    for _ in range(2):
        with pytest.raises(TypeError, match="does not compile"):
            compilation.compiled(lambda data: None, "float32")
    assert numba.config.CACHE_DIR == ""


def test_the_notice_comes_only_if_it_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    printed = []
    noticed = threading.Event()

    def fake_print(text: str, **options: object) -> None:
        printed.append((text, options["file"]))
        noticed.set()

    monkeypatch.setattr(compilation, "print", fake_print, raising=False)
    monkeypatch.setattr(compilation, "_PATIENCE", 60.0)
    monkeypatch.setattr(compilation, "_c_function", lambda function, cache: None)
    compilation.compiled(lambda data: None, "float32")
    assert printed == []

    monkeypatch.setattr(compilation, "_PATIENCE", 0.0)
    monkeypatch.setattr(compilation, "_c_function", lambda function, cache: noticed.wait(60))
    compilation.compiled(lambda data: None, "float64")
    assert printed == [(compilation.NOTICE.format(dtype="float64"), sys.stderr)]


# -------------------------------------------------------------------------------------------------------- without Numba


def test_without_numba_auto_steps_through_eigh_and_numba_is_refused_in_one_sentence() -> None:
    """In a process where Numba cannot be imported."""
    script = (
        'import sys\nsys.modules["numba"] = None\n'
        + STEP
        + textwrap.dedent("""
        from blockadapt.kernels import Batch, get_kernel
        from blockadapt.spectrum import INVERSE_ROOT
        print(get_kernel("auto").kernel_for(Batch(3, torch.float32, torch.device("cpu"), INVERSE_ROOT)).name)
        try:
            BlockAdam([param], backend="numba")
        except ImportError as error:
            print(error)
    """)
    )
    out, err = run(script, "auto")
    _, kernel, refusal = out.splitlines()
    assert kernel == "eigh"
    assert refusal == "BlockAdam: `backend` must be one whose package numba is installed, got 'numba'."
    assert err == ""


def test_importing_the_library_does_not_import_numba() -> None:
    out, _ = run("import sys, blockadapt; print('numba' in sys.modules)")
    assert out == "False"


def test_eigh_needs_no_compilation() -> None:
    assert [type(kernel) for kernel in get_kernel("eigh").kernels] == [EighKernel]
    with event.install_recorder("numba:run_pass") as recorder:
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer = blockadapt.BlockAdam([param], backend="eigh")
        param.grad = torch.ones(4)
        optimizer.step()
        assert recorder.buffer == []
