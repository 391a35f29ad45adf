"""A file is there whole, or as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockadapt_experiments.files.atomic import atomic, read_json, write_json


def test_a_file_that_could_not_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_json(path, {"old": 1})
    with pytest.raises(RuntimeError, match="power"), atomic(path) as file:  # noqa: PT012
        file.write(b"half a")
        raise RuntimeError("power")
    assert read_json(path) == {"old": 1}
    write_json(path, {"new": 2})
    assert read_json(path) == {"new": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
