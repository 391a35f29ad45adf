"""Reads data sets as tensors."""
