"""Start the `blockadapt` command, which is also `python -m blockadapt_experiments`."""

from __future__ import annotations

import sys

EXTRA = {
    "dask",
    "datasets",
    "distributed",
    "jinja2",
    "matplotlib",
    "PIL",
    "pyarrow",
    "pydantic",
    "pytorch_optimizer",
    "rich",
    "scipy",
    "sklearn",
    "tensorboard",
    "tomli",
    "typer",
}
"""What the `experiments` extra installs, by the names they are imported under."""


def main() -> None:
    """Run the command, or say how to install what it lacks. `compile` is the library's own, and lacks nothing.

    Raises:
        ModuleNotFoundError: A module is missing that no extra installs.
    """
    if sys.argv[1:2] == ["compile"]:
        from blockadapt.compile import main as compile_kernels

        sys.exit(compile_kernels(sys.argv[2:]))
    try:
        from blockadapt_experiments.commands.cli import app

        app(prog_name="blockadapt")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        print(
            f'blockadapt: this command needs {missing}; install it with pip install "blockadapt[experiments]".',
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
