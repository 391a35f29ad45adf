"""Says how files are written: whole or not at all; figures without pyplot."""
