"""Says of data that it is not to be had."""

from __future__ import annotations


class MissingData(ValueError):
    """Says that a data set is not to be had; the sentence says both ways to get it."""
