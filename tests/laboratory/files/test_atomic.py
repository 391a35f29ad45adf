"""A file is there whole, or as it was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockadapt_experiments.files.atomic import atomic, atomic_text, read_json, write_json
from support.disk import full_disk, posix


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


@posix
def test_on_a_full_disk_nothing_stays_and_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_json(path, {"old": 1})
    with full_disk(10_000), pytest.raises(OSError, match="too large") as refused:
        write_json(path, {"new": "x" * 20_000})
    assert refused.value.filename == str(path)
    with full_disk(10_000), pytest.raises(OSError, match="too large"), atomic_text(path) as file:
        file.write("x" * 20_000)
    assert read_json(path) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_is_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, sentence in (
        ("[]", "must hold a table, got []."),
        ("{oops", "is not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))."),
        ('{"a": "1"}', "must have `a` as `blockadapt run` writes it."),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"^run: ") as refused:
            read_json(path, "run", {"a": int})
        assert str(refused.value) == f"run: {str(path)!r} {sentence}"
