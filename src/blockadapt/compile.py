"""Compile the CPU kernels ahead of time, as when a container is built: `python -m blockadapt.compile`."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence

from blockadapt.validation import require_choice

DTYPES = ("float32", "float64")


def compile_kernels(dtypes: Sequence[str] = DTYPES) -> None:
    """Compile the CPU kernel for each of these dtypes into the user's cache, and print the seconds and the folder.

    A kernel that lies there already is loaded. Later processes of the same user on the same kind of processor compile
    nothing.

    Args:
        dtypes: `"float32"`, `"float64"` or both.

    Raises:
        OSError: The cache cannot be used; the message says why.
        ImportError: Numba cannot be imported, so there is no kernel to compile.
    """
    for position, dtype in enumerate(dtypes):
        require_choice("compile_kernels", f"dtypes[{position}]", dtype, DTYPES)

    import numpy as np

    from blockadapt.kernels.cpu.compilation import CacheWarning, cache_folder, compiled

    try:
        from blockadapt.kernels.cpu.step import worker
    except ImportError as error:
        raise ImportError("blockadapt: there is no kernel to compile, because Numba cannot be imported.") from error

    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        for dtype in dtypes:
            start = time.perf_counter()
            try:
                compiled(worker(getattr(np, dtype)), dtype)
            except CacheWarning as warning:
                raise OSError(str(warning)) from None
            print(f"{dtype}: {time.perf_counter() - start:.1f} s, in {cache_folder()}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. It returns 0, or 1 with one sentence on stderr if nothing could be kept."""
    argparse.ArgumentParser(prog="python -m blockadapt.compile", description=__doc__).parse_args(arguments)
    try:
        compile_kernels()
    except (OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
