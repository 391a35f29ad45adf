"""Compiling: once for all processes, told only when it happens, from a cache that nobody else can have written."""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.core import event

import blockadapt
from blockadapt.kernels import Coefficients, Descent, Place, Segment, get_kernel
from blockadapt.kernels.cpu import compilation
from blockadapt.kernels.cpu.compilation import COMPILING, COMPILING_UNKEPT, WAITING, CacheWarning, compiled
from blockadapt.kernels.eigh import EighKernel
from blockadapt.kernels.host import HostKernel
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


# --------------------------------------------------------------------------------------------------- the whole kernel


@pytest.mark.slow
def test_only_the_first_process_compiles_and_says_so_in_one_line(tmp_path: Path) -> None:
    first, notice = run(STEP, XDG_CACHE_HOME=str(tmp_path))
    assert notice == COMPILING.format(dtype="float32") + "\n"
    cached = contents(tmp_path)
    assert len(cached) == 2  # the kernel and its lock
    second, silence = run(STEP, XDG_CACHE_HOME=str(tmp_path))
    assert silence == ""
    assert second == first
    assert contents(tmp_path) == cached


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_made_costs_a_compilation_and_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    blocked_result, told = run(STEP, XDG_CACHE_HOME=str(blocked))
    assert f"the cache {blocked}/blockadapt/kernels cannot be used: {blocked} is a link or a file." in told
    assert COMPILING_UNKEPT.format(dtype="float32") in told
    assert blocked.read_text() == "not a folder"
    assert blocked_result == run(STEP, XDG_CACHE_HOME=str(tmp_path / "good"))[0]


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


# --------------------------------------------------------------------------------------- the cache, in small functions


def sets_seven(data: Any) -> None:
    """Allocates too, for loaded code has to find Numba's allocator."""
    out = numba.carray(data, (1,), np.int64)
    out[0] = np.full(3, 7).max()


def sets_eight(data: Any) -> None:
    out = numba.carray(data, (1,), np.int64)
    out[0] = 8


def setting(value: int) -> Callable[[Any], None]:
    def sets(data: Any) -> None:
        out = numba.carray(data, (1,), np.int64)
        out[0] = value

    return sets


def result(function: Callable[[Any], None]) -> int:
    """What a function sets once it is compiled or loaded."""
    out = np.zeros(1, dtype=np.int64)
    compiled(function, "float32").ctypes(out.ctypes.data)
    return int(out[0])


def passes(function: Callable[[Any], None]) -> int:
    """How many passes of its compiler Numba runs until the function is there; it has to set seven."""
    with event.install_recorder("numba:run_pass") as recorder:
        assert result(function) == 7
    return sum(entry.is_start for _, entry in recorder.buffer)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and the folder below it that will hold kernels."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "blockadapt" / "kernels"


def kernel_in(folder: Path) -> Path:
    """The one kernel that lies there."""
    [kernel] = [path for path in folder.iterdir() if path.suffix != ".lock"]
    return kernel


def test_what_was_compiled_is_loaded_the_next_time(cache: Path) -> None:
    assert passes(sets_seven) > 0
    assert passes(sets_seven) == 0
    kernel_in(cache).unlink()
    assert passes(sets_seven) > 0


@pytest.mark.parametrize("damage", [lambda kept: kept[:-1], lambda kept: kept[:100], lambda kept: b""])
def test_a_damaged_kernel_is_compiled_again(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    result(sets_seven)
    kernel = kernel_in(cache)
    whole = kernel.read_bytes()
    kernel.write_bytes(damage(whole))
    assert passes(sets_seven) > 0
    assert kernel_in(cache).stat().st_size > len(damage(whole))
    assert passes(sets_seven) == 0


def test_a_kernel_that_calls_what_is_not_there_is_compiled_again(cache: Path) -> None:
    result(sets_seven)
    names, _, code = kernel_in(cache).read_bytes()[32:].partition(b"\0")
    assert b"NRT_" in names
    content = names + b" no_such_function\0" + code
    kernel_in(cache).write_bytes(hashlib.sha256(content).digest() + content)
    assert passes(sets_seven) > 0


def test_functions_that_differ_only_in_what_they_close_over_are_kept_apart(cache: Path) -> None:
    for _ in range(2):  # compiled, then loaded
        assert [result(setting(value)) for value in (1, 2)] == [1, 2]


def test_functions_that_differ_deep_in_an_array_are_kept_apart(cache: Path) -> None:
    def at_thousand(value: int) -> Callable[[Any], None]:
        table = np.zeros(2000, dtype=np.int64)  # so long that it is not printed whole
        table[1000] = value

        def sets(data: Any) -> None:
            out = numba.carray(data, (1,), np.int64)
            out[0] = table[out[0] + 1000]

        return sets

    assert [result(at_thousand(value)) for value in (1, 2)] == [1, 2]


def test_code_with_addresses_of_this_process_is_not_kept(cache: Path) -> None:
    table = np.full(1 << 20, 7)  # too large for Numba to copy into the code

    def sets(data: Any) -> None:
        out = numba.carray(data, (1,), np.int64)
        out[0] = table[out[0]]

    with pytest.warns(CacheWarning, match="the code holds addresses of this process"):
        assert result(sets) == 7
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_an_error_while_compiling_reaches_the_caller_and_frees_the_lock(cache: Path) -> None:
    def wrong(data: Any) -> None:
        data.nothing()

    for _ in range(2):
        with pytest.raises(numba.TypingError):
            compiled(wrong, "float32")
    assert result(sets_seven) == 7


# --------------------------------------------------------------------------------------------- what others could plant


class Marker:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def planted(cache: Path, tmp_path: Path) -> Iterator[Path]:
    """The cache with the kernel of another function in the place of `sets_seven`'s; nothing else may run it."""
    result(sets_eight)
    other = kernel_in(cache)
    eight = other.read_bytes()
    other.unlink()
    result(sets_seven)
    kernel_in(cache).write_bytes(eight)
    assert result(sets_seven) == 8  # so it would run
    return cache


@pytest.mark.parametrize("permissions", [0o777, 0o770, 0o1777])
def test_a_kernel_planted_in_a_folder_that_others_may_write_does_not_run(planted: Path, permissions: int) -> None:
    planted.chmod(permissions)
    before = contents(planted)
    sentence = (
        f"blockadapt: every process compiles the CPU kernel for itself, because the cache {planted} cannot be used: "
        f"other users may write {planted}."
    )
    with pytest.warns(CacheWarning) as caught:
        assert passes(sets_seven) > 0
    assert [str(warning.message) for warning in caught] == [sentence]
    assert contents(planted) == before


def test_a_planted_file_that_others_may_write_does_not_run(planted: Path) -> None:
    kernel_in(planted).chmod(0o620)
    with pytest.warns(CacheWarning, match="other users may write .*/float32-"):
        assert passes(sets_seven) > 0


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a file away")
def test_a_planted_file_of_another_user_does_not_run(planted: Path) -> None:
    os.chown(kernel_in(planted), 65534, 65534)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert passes(sets_seven) > 0


def test_a_folder_that_is_a_link_is_not_used(planted: Path) -> None:
    elsewhere = planted.rename(planted.parent / "elsewhere")
    planted.symlink_to(elsewhere)
    with pytest.warns(CacheWarning, match="is a link or a file"):
        assert passes(sets_seven) > 0


@pytest.mark.parametrize("permissions", [0o700, 0o777])
def test_nothing_is_ever_unpickled(cache: Path, tmp_path: Path, permissions: int) -> None:
    """Neither in the kernel's place nor in the files that Numba's own cache would read."""
    result(sets_seven)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "CACHE_DIR", str(cache))
        numba.cfunc("void(voidptr)", cache=True)(sets_seven)
    marker = tmp_path / "marker"
    files = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {path.suffix for path in files} == {"", ".nbi", ".nbc"}
    for path in files:
        path.write_bytes(pickle.dumps(Marker(marker)))
    cache.chmod(permissions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        assert passes(sets_seven) > 0
    assert not marker.exists()
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists()  # so it would have been made


def test_what_is_kept_is_the_users_alone_with_an_open_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        result(sets_seven)
    finally:
        os.umask(before)
    base = cache.parents[1]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (base, *base.rglob("*"))}
    assert sorted(modes.values()) == [0o600, 0o600, 0o700, 0o700, 0o700]


# ------------------------------------------------------------------------------------------------------ where it lies


def test_the_cache_lies_below_numbas_folder_if_the_user_has_set_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    assert compilation.cache_folder() == tmp_path / "numba" / "blockadapt" / "kernels"
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert compilation.cache_folder() == tmp_path / "xdg" / "blockadapt" / "kernels"
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative", "./relative"):  # the XDG specification demands an absolute path
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert compilation.cache_folder() == tmp_path / ".cache" / "blockadapt" / "kernels"


def test_numbas_own_cache_setting_stays_as_the_user_set_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = str(tmp_path / "mine")
    monkeypatch.setattr(numba.config, "CACHE_DIR", mine)
    assert result(sets_seven) == 7
    assert mine == numba.config.CACHE_DIR
    assert kernel_in(tmp_path / "mine" / "blockadapt" / "kernels")


def test_another_version_or_processor_has_a_kernel_of_its_own(cache: Path) -> None:
    def change(owner: object, attribute: str, value: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, value)
            names.append(compilation._file_name(sets_seven, "float32"))

    import llvmlite
    from numba.core.codegen import CPUCodegen

    names = [compilation._file_name(sets_seven, dtype) for dtype in ("float32", "float64")]
    names.append(compilation._file_name(sets_eight, "float32"))
    change(numba, "__version__", "other")
    change(llvmlite, "__version__", "other")
    change(sys, "version", "other")
    change(CPUCodegen, "magic_tuple", lambda self: ("another", "processor"))
    change(Path, "read_bytes", lambda self: b"other source")
    assert len(set(names)) == 8
    assert compilation._file_name(sets_seven, "float32") == names[0]


# -------------------------------------------------------------------------------------------------- several processes

SLOWLY = textwrap.dedent("""
    import ctypes, os, sys, time
    from pathlib import Path
    import numba, numpy as np
    from numba.extending import intrinsic
    from blockadapt.kernels.cpu import compilation

    here = Path(__file__).parent
    compilation._PATIENCE = 0.0
    if os.getuid() == 0:  # whom no permission stops, until it gives up its capabilities
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        assert ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) == 0

    @intrinsic
    def slowly(typing, value):
        with (here / "compiling").open("a") as log:
            print(os.getpid(), file=log)
        while not (here / "go").exists():
            time.sleep(0.01)
        return numba.int64(numba.int64), lambda context, builder, signature, args: args[0]

    def sets_seven(data):
        out = numba.carray(data, (1,), np.int64)
        out[0] = slowly(7)

    out = np.zeros(1, np.int64)
    compilation.compiled(sets_seven, "float32").ctypes(out.ctypes.data)
    print(out[0])
""")


class Slowly:
    """Processes with one cache and one function, whose compiling goes on until `go`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels = folder / "cache" / "blockadapt" / "kernels"
        self._running: list[tuple[subprocess.Popen[str], Path]] = []
        (folder / "slowly.py").write_text(SLOWLY)

    def start(self) -> Path:
        """Start a process; returns the file that it tells what it does."""
        told = self.folder / f"told-{len(self._running)}"
        with told.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, str(self.folder / "slowly.py")],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment(XDG_CACHE_HOME=str(self.folder / "cache")),
            )
        self._running.append((process, told))
        return told

    def go(self) -> None:
        (self.folder / "go").touch()

    def finish(self) -> list[str]:
        """Wait until all have ended well; returns what each told."""
        ended, self._running = self._running, []
        for process, told in ended:
            out, _ = process.communicate(timeout=PATIENCE)
            assert (process.returncode, out) == (0, "7\n"), told.read_text()
        return [told.read_text() for _, told in ended]

    def kill(self) -> None:
        for process, _ in self._running:
            process.kill()
            process.communicate()

    def compiled_by(self) -> set[str]:
        """The processes that have compiled."""
        log = self.folder / "compiling"
        return set(log.read_text().split()) if log.exists() else set()


@pytest.fixture
def slowly(tmp_path: Path) -> Iterator[Slowly]:
    processes = Slowly(tmp_path)
    yield processes
    processes.kill()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_of_three_processes_one_compiles_the_others_wait_and_each_says_so_once(slowly: Slowly) -> None:
    compiling, waiting = COMPILING.format(dtype="float32") + "\n", WAITING.format(dtype="float32") + "\n"
    first = slowly.start()
    wait_until(slowly.compiled_by)
    others = [slowly.start() for _ in range(2)]
    wait_until(lambda: first.read_text() and all(other.read_text() for other in others))
    slowly.go()
    assert slowly.finish() == [compiling, waiting, waiting]
    assert len(slowly.compiled_by()) == 1


def test_a_load_from_the_cache_says_nothing_however_long_it_takes(slowly: Slowly) -> None:
    slowly.go()
    slowly.start()
    assert slowly.finish() == [COMPILING.format(dtype="float32") + "\n"]
    slowly.start()
    assert slowly.finish() == [""]


def test_a_process_that_cannot_write_the_cache_loads_what_is_there_and_compiles_what_is_not(slowly: Slowly) -> None:
    slowly.go()
    slowly.kernels.mkdir(parents=True)
    slowly.kernels.chmod(0o500)
    slowly.start()
    [told] = slowly.finish()
    assert f"because the cache {slowly.kernels} cannot be used: Permission denied." in told
    assert list(slowly.kernels.iterdir()) == []

    slowly.kernels.chmod(0o700)
    slowly.start()
    slowly.finish()
    assert len(slowly.compiled_by()) == 2
    slowly.kernels.chmod(0o500)
    slowly.start()
    assert slowly.finish() == [""]
    assert len(slowly.compiled_by()) == 2


def test_a_process_that_is_killed_while_it_compiles_leaves_no_lock_behind(slowly: Slowly) -> None:
    slowly.start()
    wait_until(slowly.compiled_by)
    slowly.kill()
    slowly._running.clear()
    slowly.go()
    slowly.start()
    slowly.finish()
    assert len(slowly.compiled_by()) == 2


def test_without_a_home_it_compiles_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(CacheWarning, match=r"for itself, because Could not determine home directory\.$"):
        assert result(sets_seven) == 7


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


@pytest.mark.parametrize("module", ["blockadapt", "blockadapt.compile", "blockadapt.kernels.cpu.compilation"])
def test_importing_the_library_imports_neither_numba_nor_filelock(module: str) -> None:
    before, after = run(
        f"import sys, torch; print('filelock' in sys.modules); import {module}; "
        "print('numba' in sys.modules, 'llvmlite' in sys.modules, 'filelock' in sys.modules)"
    )[0].splitlines()
    assert after == f"False False {before}"


def test_eigh_needs_no_compilation() -> None:
    assert [type(kernel) for kernel in get_kernel("eigh").kernels] == [EighKernel, HostKernel]
    with event.install_recorder("numba:run_pass") as recorder:
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer = blockadapt.BlockAdam([param], backend="eigh")
        param.grad = torch.ones(4)
        optimizer.step()
        assert recorder.buffer == []
