"""The example does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "torchrun_resume.py"


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*command, str(EXAMPLE), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("how", ["fsdp", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_another_number_of_processes_to_the_same_loss(how: str, tmp_path: Path) -> None:
    common = ("--how", how, "--steps", "12")
    killed = torchrun(2, *common, "--folder", str(tmp_path / "a"), "--die-at", "8")
    assert killed.returncode != 0
    assert "loss" not in killed.stdout
    resumed = torchrun(3, *common, "--folder", str(tmp_path / "a"))
    whole = torchrun(1, *common, "--folder", str(tmp_path / "b"))
    assert "3 processes, steps 5 to 12: loss " in resumed.stdout, resumed.stderr
    assert "1 processes, steps 0 to 12: loss " in whole.stdout, whole.stderr
    assert resumed.stdout.split("loss ")[1] == whole.stdout.split("loss ")[1]
