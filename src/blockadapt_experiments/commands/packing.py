"""Pack the records of an experiment into one file, to be kept in a repository or sent to others.

What is packed is what a report reads and what lets the folder grow: `tar -xf FILE` gives the folder back. Checkpoints,
weights, TensorBoard's logs and reports stay behind. The same records make the same bytes, whenever they are packed.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from blockadapt_experiments.files.atomic import atomic, require_no_url
from blockadapt_experiments.results.recorded_runs import EXPERIMENT, read_experiment

SUFFIX = ".tar.xz"

KINDS = (".json", ".jsonl", ".txt", ".npz")
"""What files of records are called: settings and results, rows, errors, arrays."""


def pack(directory: Path, file: Path) -> list[str]:
    """Pack the records in a directory; returns the names of what was packed.

    Raises:
        ValueError: That is no directory of an experiment, its settings were changed, or the file has another ending.
    """
    require_no_url("pack", directory, "dir")
    require_no_url("pack", file, "out", "file")
    if not (directory / EXPERIMENT).is_file():
        rule = "a directory that `blockadapt run` has written to"
        raise ValueError(f"pack: `dir` must be {rule}, got {str(directory)!r}.")
    read_experiment(directory, "pack", {"experiment": str})
    if not file.name.endswith(SUFFIX):
        raise ValueError(f"pack: `out` must be a file name that ends in {SUFFIX}, got {str(file)!r}.")
    name = directory.resolve().name
    packed = []
    with (
        atomic(file) as target,
        lzma.open(target, "wb", preset=9) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in _records(directory):
            content = path.read_bytes()  # at once: a run may go on meanwhile
            entry = tarfile.TarInfo(f"{name}/{path.relative_to(directory).as_posix()}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
            packed.append(entry.name)
    return packed


def _records(directory: Path) -> Iterator[Path]:
    """Find what to pack.

    Yields:
        A file, in the order of their names.
    """
    found = [*directory.glob("*.json"), *(directory / "runs").rglob("*"), *(directory / "tuning").rglob("*")]
    for path in sorted(found):
        if path.is_file() and path.suffix in KINDS and not (path.suffix == ".npz" and _only_weights(path)):
            yield path


def _only_weights(path: Path) -> bool:
    """Tell whether arrays are those of a run that leaves nothing but its weights, which no report reads.

    Raises:
        ValueError: It is no archive of arrays.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist() == ["weights.npy"]
    except zipfile.BadZipFile:
        raise ValueError(f"pack: {str(path)!r} is no archive of arrays.") from None
