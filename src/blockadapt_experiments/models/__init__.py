"""Holds the networks of the experiments."""
