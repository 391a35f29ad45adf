"""The figures of `docs/gpu.md`, made without a GPU.

    python tests/support/gpu_figures.py compiled            what the compilers report, for each kernel and GPU
    python tests/support/gpu_figures.py compiled further    the same of steps that the document does not tell of
    python tests/support/gpu_figures.py counted             what one tile of 32 executes, counted by the interpreter
    python tests/support/gpu_figures.py accurate            how large its errors are beside those of eigh in float32

Each prints a table in Markdown. Triton decides at import whether it compiles or interprets: a process does one of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

COMPILED, FURTHER, ACCURATE = "compiled", "further", "accurate"
MEASURED = ", measured"
"""Ends the name of a step that counts what it shows of α*."""

os.environ["TRITON_INTERPRET"] = "0" if COMPILED in sys.argv else "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from blockadapt.kernels import Tally  # noqa: E402
from blockadapt.kernels.gpu import work  # noqa: E402
from support.accuracy import GPU_KINDS, Errors, beside_eigh  # noqa: E402
from support.blocks import PATHS, take_, training  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

CASES = [
    ("plain", 10, torch.float32),
    ("plain", 2, torch.float32),
    ("amsgrad, new basis", 16, torch.float32),
    ("amsgrad, kept basis", 16, torch.float32),
    ("amsgrad, new basis", 64, torch.float32),
    ("amsgrad, kept basis", 64, torch.float32),
    ("plain", 10, torch.float64),
    ("amsgrad, new basis", 16, torch.float64),
    ("amsgrad, kept basis", 16, torch.float64),
    ("plain" + MEASURED, 10, torch.float32),
]
"""`advance` is the same kernel for all n but 2."""

FURTHER_CASES = [
    ("without m", 10, torch.float32),
    ("amsgrad, new basis", 2, torch.float32),
    ("amsgrad, new basis", 2, torch.float64),
    ("amsgrad, kept basis", 2, torch.float64),
    ("amsgrad, new basis", 25, torch.float64),
    ("amsgrad, kept basis", 25, torch.float64),
    ("amsgrad, new basis" + MEASURED, 16, torch.float32),
    ("amsgrad, kept basis" + MEASURED, 16, torch.float32),
    ("amsgrad, new basis" + MEASURED, 16, torch.float64),
    ("amsgrad, kept basis" + MEASURED, 16, torch.float64),
    ("amsgrad, kept basis" + MEASURED, 8, torch.float64),
]


def launches_of(path: str, n: int, dtype: torch.dtype, target: GPUTarget) -> list[work.Launch]:
    """The launches of one such step, as on such a GPU with 108 multiprocessors."""
    registers = work.registers
    work.processors, work.lanes_on = (lambda device: 108), (lambda device, blocks: target.warp_size)
    there = torch.device("cuda" if target.backend == "cuda" else "cpu")
    work.registers = lambda device, *most: registers(there, *most)
    case = PATHS[path.removesuffix(MEASURED)](training(n, 40, dtype))
    place = case.segment().place
    tally = Tally(place.batch.device) if path.endswith(MEASURED) else None
    work_list = work.TritonWorkList(place.batch, [place], case.refresh, tally)
    try:
        return work_list._launches(torch.zeros(1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.float64))
    finally:
        work.registers = registers


def build(launch: work.Launch, target: GPUTarget) -> Any:
    """Compile a launch for a GPU that need not be there, as Triton would at the launch.

    Triton would compile integers of 1 and multiples of 16 apart, were it not told to leave all of them alone.
    """
    names = launch.function.arg_names
    given = dict(zip(names, launch.arguments, strict=False))
    assert {name for name, value in given.items() if isinstance(value, int)} == {*launch.function.do_not_specialize}
    pointers = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64"}
    signature = {
        name: "constexpr" if name not in given else pointers[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        for name, value in ((name, given.get(name)) for name in names)
    }
    constants = {(names.index(name),): value for name, value in launch.options.items() if name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    options = {name: value for name, value in launch.options.items() if name not in names}
    source = ASTSource(launch.function, signature, constants, aligned)
    return triton.compile(source, target=target, options=options)


def figures(built: Any, target: GPUTarget) -> tuple[int, int, int, int]:
    """Registers and bytes spilt a thread, bytes of shared memory a program, and instructions."""
    shared = built.metadata.shared
    if target.backend == "hip":
        text = built.asm["amdgcn"]

        def value(name: str) -> int:
            return int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])

        instructions = len(re.findall(r"^\s+[svdb][a-z]*_[a-z0-9_]+", text, re.MULTILINE))
        return value("vgpr_count"), value("private_segment_fixed_size"), shared, instructions
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(built.asm["cubin"])
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True)
        sass = subprocess.run([tools / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    instructions = len(re.findall(r"/\*[0-9a-f]{4,}\*/\s", sass))
    return found["REG"], found["STACK"] + found["LOCAL"], shared, instructions


def check_lanes(built: Any, target: GPUTarget) -> None:
    """A lane is the same thread throughout: there is one layout, one number a thread, and none moves to another."""
    text = built.asm["ttgir"]
    layouts = re.findall(r"#ttg\.\w+<\{.*?\}>", text)
    one = (
        f"#ttg.blocked<{{sizePerThread = [1], threadsPerWarp = [{target.warp_size}], warpsPerCTA = [1], order = [0]}}>"
    )
    assert layouts == [one], layouts
    assert "convert_layout" not in text


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print each row as soon as it is known."""
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    for cells in rows:
        print("| " + " | ".join(cells) + " |", flush=True)


def compiled(cases: Sequence[tuple[str, int, torch.dtype]]) -> Iterator[list[str]]:
    """A row for every launch of every case: what it is, and its figures for each GPU."""
    for path, n, dtype in cases:
        for launches in zip(*(launches_of(path, n, dtype, target) for target in TARGETS.values()), strict=True):
            kernel, cells = launches[0].function.__name__, []
            for launch, target in zip(launches, TARGETS.values(), strict=True):
                built = build(launch, target)
                if kernel == "advance":
                    check_lanes(built, target)
                cells.append(" · ".join(map(str, figures(built, target))))
            statistics, warps = str(dtype).removeprefix("torch."), str(launches[0].options["num_warps"])
            yield [f"`{kernel}`", str(n), path, statistics, warps, *cells]


def print_compiled() -> None:
    heads = ["kernel", "n", "step", "statistics", "warps", *TARGETS]
    print_table(heads, compiled(FURTHER_CASES if FURTHER in sys.argv else CASES))


COUNTED = {
    "loads": ("create_masked_load",),
    "stores": ("create_masked_store",),
    "operations": ("binary_op", "unary_op", "ternary_op", "create_rsqrt"),
}
"""The methods by which the interpreter does each."""


def count(path: str, n: int) -> Counter[str]:
    """What a program executes for one tile of 32 typical blocks: rows loaded and stored, and operations on rows."""
    from triton.runtime.interpreter import InterpreterBuilder

    from blockadapt.kernels.gpu.kernel import TritonKernel

    counts = Counter[str]()

    def counting(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, first: Any, *rest: Any) -> Any:
            counts[kind] += -(-first.data.size // 32) if first.data.size > 1 else 0
            return method(self, first, *rest)

        return wrapper

    work.lanes_on = lambda device, blocks: 32
    case = PATHS[path](training(n, 32, torch.float32))
    with ExitStack() as stack:
        for kind, names in COUNTED.items():
            for name in names:
                method = counting(kind, getattr(InterpreterBuilder, name))
                stack.enter_context(patch.object(InterpreterBuilder, name, method))
        take_(TritonKernel(), {case.batch: [case.segment()]})
    return counts


class Device(NamedTuple):
    """What the estimate knows of a GPU: bytes a second, multiprocessors, cycles a second."""

    memory: float
    cache: float
    processors: int
    clock: float


DEVICES = {"A100": Device(1.56e12, 4e12, 108, 1.41e9), "H100": Device(3.35e12, 5.5e12, 132, 1.7e9)}
"""A100 SXM 40 GB and H100 SXM: data sheets, but for the L2 cache, whose figures are rough."""


def estimate(found: Counter[str], n: int, kept: bool, device: Device) -> tuple[float, float, float]:
    """Nanoseconds a block when the GPU is full, at best and at worst, and microseconds for a tile that is alone.

    A full GPU is bound by instructions (two more for each row's address), by the L1 cache (a line a cycle; a row of V
    is 32 lines, for blocks lie one after another), by what is written through to L2, or by memory. At best these
    overlap and the longest counts; at worst they add up. A lone tile waits 5 cycles for an operation, 35 for a row.
    """
    rows = found["loads"] + found["stores"]
    triangle = n * (n + 1) // 2
    cycles = device.processors * device.clock
    moved = 4 * (2 * triangle + 5 * n + (kept and n > 1) * (n * (n - 1) // 2 + 2 * n))  # reflections, eigenvalues
    times = (
        (found["operations"] + 3 * rows) / (4 * cycles) / 32,
        (rows + 31 * 2 * triangle) / cycles / 32,
        found["stores"] * 128 / device.cache / 32,
        moved / device.memory,
    )
    alone = (5 * found["operations"] + 35 * found["loads"]) / device.clock
    return max(times) * 1e9, sum(times) * 1e9, alone * 1e6


def short(number: float) -> str:
    """Two digits, or all before the point."""
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"


def counted() -> Iterator[list[str]]:
    """A row for every size and step: what one tile executes, and the estimate for each GPU."""
    for n in (1, 2, 4, 9, 10, 16, 25, 64):
        for path in ("plain", "kept basis"):
            found = count(path, n)
            cells = [str(n), path, *(f"{found[kind]:,}" for kind in COUNTED)]
            for device in DEVICES.values():
                best, worst, alone = estimate(found, n, path == "kept basis", device)
                cells.append(f"{short(best)} – {short(worst)}; {short(alone)}")
            yield cells


def print_counted() -> None:
    estimates = (f"{name}: ns a block, full; µs, one tile" for name in DEVICES)
    print_table(["n", "step", "rows loaded", "rows stored", "operations", *estimates], counted())


def accurate() -> Iterator[list[str]]:
    """A row for every size: over all kinds of blocks, the largest median error beside eigh's, and 99th percentile."""
    from blockadapt.kernels.gpu.kernel import TritonKernel

    for n, blocks in ((3, 16384), (10, 2048)):
        work.lanes_on = lambda device, blocks: blocks
        pairs = [map(Errors.of, beside_eigh(TritonKernel(), kind, n, blocks)[:2]) for kind in GPU_KINDS]
        ratios = [[own / other for own, other in zip(ours, theirs, strict=True)] for ours, theirs in pairs]
        yield [str(n), f"{blocks:,}", *(f"{max(each):.2f} ×" for each in zip(*ratios, strict=True))]


def print_accurate() -> None:
    print_table(["n", "blocks of each kind", "median", "99th percentile"], accurate())


if __name__ == "__main__":
    {COMPILED: print_compiled, ACCURATE: print_accurate}.get(sys.argv[1], print_counted)()
