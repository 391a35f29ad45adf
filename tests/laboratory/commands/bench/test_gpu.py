"""`blockadapt bench --device`: one sentence without a GPU; the contenders and their rows, on the CPU in its place."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from blockadapt_experiments.commands.bench import gpu as bench_gpu
from blockadapt_experiments.commands.cli import app


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "meta", "nonsense"])
def test_without_the_device_one_sentence_says_so_and_nothing_is_written(device: str, tmp_path: Path) -> None:
    out = tmp_path / "bench"
    result = CliRunner().invoke(app, ["bench", "--device", device, "--out", str(out)])
    assert result.exit_code == 2
    assert result.stderr == f"bench: `device` must be the CPU or a GPU that torch finds here, got {device!r}.\n"
    assert not out.exists()


def test_every_contender_is_timed_beside_foreach_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton's kernel in its interpreter, for blocks of 2; where Triton compiles, `eigh` takes these blocks."""
    monkeypatch.setattr(bench_gpu, "models", lambda: {"tiny": lambda: nn.Linear(4, 2)})
    has_triton = find_spec("triton") is not None
    makes = {name: make for name, make in bench_gpu.contenders().items() if has_triton or "triton" not in name}
    rows = list(bench_gpu.gpu_rows(torch.device("cpu"), 5, makes, "tiny"))
    assert [row.name for row in rows] == [
        f"step, tiny, cpu: {name} / Adam (foreach)" for name in makes if name != "Adam (foreach)"
    ]
    assert len(rows) == 3 + 2 * has_triton
    assert all(row.value > 0 for row in rows)


def test_the_triton_contenders_ask_for_that_kernel() -> None:
    pytest.importorskip("triton")
    for name in ("Block-Adam (triton)", "Block-Adam (triton, refresh_every=10)"):
        optimizer = bench_gpu.contenders()[name]([nn.Parameter(torch.ones(3))])
        assert optimizer.kernels.kernels[0].name == "triton"  # type: ignore[attr-defined]


def test_the_networks_are_a_small_one_and_one_that_fills_a_gpu() -> None:
    sizes = {name: sum(param.numel() for param in make().parameters()) for name, make in bench_gpu.models().items()}
    assert sizes == {"LeNet-300-100": 266_610, "6 layers of 2048": 25_178_112}
