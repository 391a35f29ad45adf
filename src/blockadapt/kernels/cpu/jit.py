"""Says how functions of the CPU kernel are compiled."""

from __future__ import annotations

from functools import partial

import numba

_compiled = partial(numba.njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

jit = _compiled()
"""Compiles functions that only compiled ones call: without entries from Python and C there is less to compile.

Called from Python, such a function crashes; its `.py_func` is what can be called.
"""

inlined = _compiled(forceinline=True, _nrt=False)
"""Compiles the stages of a step: they share a scratch of thirty arrays, and to pass these on would take longer than
some stages do. For the same reason they do without Numba's run-time, which counts references to every array: they
return none."""
