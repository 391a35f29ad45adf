"""The fast kernel: 32 blocks at a time in SIMD lanes, compiled by Numba."""
