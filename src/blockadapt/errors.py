"""Exceptions that callers may want to catch by name."""


class NonFiniteGradientError(RuntimeError):
    """A gradient holds NaN or infinity, or is so large that g gᵀ overflows. Nothing was changed."""
