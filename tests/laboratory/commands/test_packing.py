"""`blockadapt pack`: what is in the file, that it gives the folder back, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from blockadapt_experiments.commands.packing import pack
from blockadapt_experiments.report import write_report
from blockadapt_experiments.report.reading import read
from support.commands import Command, tiny
from support.disk import full_disk, posix
from support.run_records import experiment, rows_of, write_experiment, write_run, write_tuned

KEPT = Path(__file__).parents[3] / "docs" / "results" / "records"


def unpacked(file: Path, into: Path) -> Path:
    """The folder that plain tar makes of it."""
    into.mkdir()
    subprocess.run(["tar", "-xf", str(file), "-C", str(into)], check=True)
    (folder,) = into.iterdir()
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Runs with weights, with pictures, unfinished, and failed; a trial; logs and what processes leave."""
    out = tmp_path / "name"
    write_experiment(out, seeds=[0, 1])
    for seed in (0, 1):
        write_run(out, "adam", "", seed, rows_of(loss=[1.0, 0.5 + seed]), arrays={"weights": np.ones(1000)})
    write_run(out, "block-adam", "", 0, rows_of(loss=[1.0, 0.25]), arrays={"weights": np.ones(3), "corpus": np.ones(2)})
    cut = write_run(out, "block-adam", "", 1, rows_of(loss=[1.0]), finished=False)
    (cut / "error.txt").write_text("MemoryError: too much\n")
    (cut / "checkpoint-before.pt").write_bytes(b"state")
    (cut / ".lock").touch()
    (cut / ".result.json.part").write_text("{")
    trial = out / "tuning" / "adam" / "-" / "lr-0.1" / "seed-1000"
    trial.mkdir(parents=True)
    (trial / "metrics.jsonl").write_text('{"epoch": 1}\n')
    write_tuned(out, {})
    logs = out / "tensorboard" / "adam"
    logs.mkdir(parents=True)
    (logs / "events.json").write_text("log")
    write_report(out, experiment())
    return out


RUN = ["metrics.jsonl", "run.json", "timing.jsonl"]


def test_records_are_packed_and_nothing_else(records: Path, tmp_path: Path) -> None:
    packed = pack(records, tmp_path / "a.tar.xz")
    folders = {
        "runs/adam/-/seed-0": [*RUN, "result.json"],
        "runs/adam/-/seed-1": [*RUN, "result.json"],
        "runs/block-adam/-/seed-0": [*RUN, "result.json", "arrays.npz"],
        "runs/block-adam/-/seed-1": [*RUN, "error.txt"],
        "tuning/adam/-/lr-0.1/seed-1000": ["metrics.jsonl"],
    }
    expected = {f"{folder}/{name}" for folder, names in folders.items() for name in names}
    found = files_in(unpacked(tmp_path / "a.tar.xz", tmp_path / "there"))
    assert found.keys() == {"experiment.json", "tuned.json", *expected}
    assert {f"name/{name}" for name in found} == {*packed}
    before = files_in(records)
    assert all(content == before[name] for name, content in found.items())


def test_a_report_of_what_was_unpacked_is_the_same(records: Path, tmp_path: Path) -> None:
    pack(records, tmp_path / "a.tar.xz")
    folder = unpacked(tmp_path / "a.tar.xz", tmp_path / "there")
    reports = []
    for place in (records, folder):
        files = write_report(place, experiment())
        reports.append({str(path.relative_to(place)): path.read_bytes() for path in files})
    assert len(reports[0]) >= 5
    assert reports[0] == reports[1]


def test_the_same_records_make_the_same_bytes(records: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.tar.xz", tmp_path / "2.tar.xz"
    pack(records, first)
    for path in records.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    pack(records, second)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        names = archive.getnames()
    assert names == sorted(names)


@pytest.mark.parametrize("file", [*KEPT.glob("*.tar.xz")], ids=lambda file: file.name)
def test_records_that_are_kept_are_whole_and_sealed(file: Path, tmp_path: Path) -> None:
    folder = unpacked(file, tmp_path / "there")
    summary, about = read(folder), json.loads((folder / "experiment.json").read_text(encoding="utf-8"))
    assert summary.complete
    assert [run.damage for run in summary.runs] == [""] * summary.planned
    assert summary.unsealed == ()
    assert {*summary.tuned} == ({*summary.arms} if about["tune"] else set())


def test_an_unpacked_folder_grows(command: Command, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "kept.tar.xz"
    assert command(*tiny(out, "optimizers=['sgd']")).code == 0
    said = command("pack", str(out), "--out", str(file))
    assert said == (0, f"Packed 5 files into {file}, {file.stat().st_size / 1e3:,.0f} kB.\n", "")
    folder = unpacked(file, tmp_path / "there")
    said = command(*tiny(folder, "optimizers=['sgd']", "seeds=[0, 1]"))
    assert said.code == 0
    assert "2 runs, 1 finished, 0 begun" in said.out
    rows = "runs/sgd/-/seed-0/metrics.jsonl"
    assert (folder / rows).read_bytes() == (out / rows).read_bytes()


def test_what_cannot_be_packed_gets_one_sentence(command: Command, records: Path, tmp_path: Path) -> None:
    said = command("pack", str(tmp_path), "--out", str(tmp_path / "a.tar.xz"))
    rule = "a directory that `blockadapt run` has written to"
    assert said == (2, "", f"pack: `dir` must be {rule}, got '{tmp_path}'.\n")
    said = command("pack", str(records), "--out", str(tmp_path / "a.zip"))
    assert said == (2, "", f"pack: `out` must be a file name that ends in .tar.xz, got '{tmp_path / 'a.zip'}'.\n")
    said = command("pack", str(records), "--out", str(tmp_path / "nowhere" / "a.tar.xz"))
    assert said == (1, "", f"blockadapt: No such file or directory ({tmp_path / 'nowhere' / 'a.tar.xz'}).\n")
    assert {path.name for path in tmp_path.iterdir()} == {"name"}


def test_damaged_arrays_get_one_sentence(command: Command, records: Path, tmp_path: Path) -> None:
    arrays = records / "runs" / "adam" / "-" / "seed-0" / "arrays.npz"
    arrays.write_bytes(b"no archive")
    said = command("pack", str(records), "--out", str(tmp_path / "a.tar.xz"))
    assert said == (2, "", f"pack: '{arrays}' is no archive of arrays.\n")
    assert not list(tmp_path.glob("*.tar.xz"))


@posix
def test_on_a_full_disk_no_half_file_stays(command: Command, records: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.tar.xz"
    with full_disk(100):
        said = command("pack", str(records), "--out", str(file))
    assert said == (1, "", f"blockadapt: File too large ({file}).\n")
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
