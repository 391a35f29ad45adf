"""How functions of the CPU kernel are compiled."""

from __future__ import annotations

import numba

jit = numba.njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""For functions that only compiled ones call: without entries from Python and C there is less to compile.

Called from Python, such a function crashes; its `.py_func` is what can be called.
"""
