"""Describe what a measurement was made on, and how much memory the process holds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from blockadapt.kernels import Batch, get_kernel
from blockadapt.spectrum import INVERSE_ROOT


def environment() -> dict[str, Any]:
    """Describe the machine, the versions, the commit, the threads and the kernel behind a measurement."""
    packages = ("blockadapt", "torch", "numpy", "numba", "scikit-learn", "pytorch_optimizer")
    return {
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": _memory_bytes(),
        },
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "git": git_state(),
        "threads": torch.get_num_threads(),
        "kernel": _default_kernel(),
    }


def made_with(environment: Mapping[str, Any]) -> str:
    """Say with which code, which torch and how many threads something was made, from what `environment` told then."""
    state, threads, versions = (environment.get(name) or {} for name in ("git", "threads", "versions"))
    commit = f"commit {state['commit'][:12]}{' and changes' * state['dirty']}" if state else ""
    version = commit or f"version {versions.get('blockadapt', '?')}"
    return f"{version}, torch {versions.get('torch', '?')}, {threads or '?'} thread{'s' * (threads != 1)}"


@lru_cache(maxsize=1)
def _default_kernel() -> str:
    """Name the kernel that moves blocks of ten weights on the CPU where nobody asks for another."""
    batch = Batch(10, torch.float32, torch.device("cpu"), INVERSE_ROOT)
    return get_kernel("auto").kernel_for(batch).name


@lru_cache(maxsize=1)
def git_state() -> dict[str, Any] | None:
    """Name the commit of this code, and whether files differ from it; None where it has no checkout of its own."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ("git", "--no-optional-locks", "-C", str(here.parent), *arguments)  # a status may write the index
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # below somebody else's checkout it is not tracked
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reset_peak_memory() -> None:
    """Start to measure the peak anew, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return


def peak_memory_bytes() -> int:
    """Return the most memory held since `reset_peak_memory`, or since the process began where that cannot be told."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _processor() -> str:
    """Name the processor as people know it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no such call, and some systems no such number
        return None
