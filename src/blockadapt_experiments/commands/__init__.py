"""What the `blockadapt` command does: parse, call, show."""
