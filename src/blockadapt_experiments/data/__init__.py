"""Data sets as tensors."""
