"""Holds the paper's experiments, one file or folder each; `registry` has them by name."""
