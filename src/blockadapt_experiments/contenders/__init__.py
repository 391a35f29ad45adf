"""Holds the optimizers that experiments can name, and the schedules of their learning rates."""
