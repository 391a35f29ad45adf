"""Compiling ahead of time: into the cache or not at all, and in one sentence why not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from blockadapt.compile import compile_kernels, main
from blockadapt.kernels.cpu.compilation import cache_folder
from blockadapt.kernels.cpu.private_folder import PrivateFolder


def test_each_dtype_gets_one_line_with_the_seconds_and_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    compile_kernels()
    lines = capsys.readouterr().out.splitlines()
    folder = re.escape(str(cache_folder()))
    assert [bool(re.fullmatch(rf"float\d\d: \d+\.\d s, in {folder}", line)) for line in lines] == [True, True]
    assert [line[:7] for line in lines] == ["float32", "float64"]
    with PrivateFolder(cache_folder()) as kept:
        assert {path.name[:7] for path in kept.path.iterdir()} >= {"float32", "float64"}


def test_only_the_dtypes_that_were_asked_for_are_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    compile_kernels(["float64"])
    assert capsys.readouterr().out.startswith("float64: ")


def test_a_cache_that_cannot_be_used_is_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    with numba.core.event.install_recorder("numba:run_pass") as recorder:
        assert main([]) == 1
    assert recorder.buffer == []
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        "blockadapt: every process compiles the CPU kernel for itself, because the cache "
        f"{tmp_path}/blockadapt/kernels cannot be used: other users may write {tmp_path}.\n"
    )
    with pytest.raises(OSError, match="other users may write"):
        compile_kernels()


@pytest.mark.parametrize("dtypes", [["float16"], ["float32", "int64"]])
def test_other_dtypes_are_refused_before_anything_is_compiled(
    dtypes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ValueError, match=rf"^compile_kernels: `dtypes\[{len(dtypes) - 1}\]` must be .*, got '{dtypes[-1]}'"
    ):
        compile_kernels(dtypes)
    assert capsys.readouterr().out == ""


def test_the_tool_compiles_where_none_of_its_packages_is() -> None:
    script = "import sys; sys.modules['typer'] = None; from blockadapt_experiments.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", script, "compile", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ahead of time" in done.stdout


def test_without_numba_the_command_fails_in_one_sentence() -> None:
    script = "import sys; sys.modules['numba'] = None; from blockadapt.compile import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "blockadapt: there is no kernel to compile, because Numba cannot be imported.\n"
