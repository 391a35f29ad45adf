"""The fast kernel moves 32 blocks at a time, in SIMD lanes; Numba compiles it."""
