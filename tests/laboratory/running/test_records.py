"""Records survive: files are whole or absent, rows are cut back to the checkpoint, one process writes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockadapt_experiments.files.atomic import read_json, write_json
from blockadapt_experiments.files.checked import is_whole, sealed
from blockadapt_experiments.results.measurements import Outcome, RunKey
from blockadapt_experiments.results.recorded_runs import read_experiment
from blockadapt_experiments.running.records import RunRecord, begin_experiment

KEY = RunKey("adam", "", 3)
ABOUT = {"arm": "adam", "lr": 0.1, "settings": {"epochs": 3}, "environment": {"threads": 2}}


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    made = RunRecord(tmp_path, KEY)
    made.folder.mkdir(parents=True)
    return made


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_folders_say_which_run_it_is(tmp_path: Path) -> None:
    assert RunRecord(tmp_path, KEY).folder == tmp_path / "runs" / "adam" / "-" / "seed-3"
    assert RunRecord(tmp_path, RunKey("sgd", "M=5", 0)).folder == tmp_path / "runs" / "sgd" / "M=5" / "seed-0"


def test_rows_beyond_the_checkpoint_are_cut_off_with_half_a_line(record: RunRecord) -> None:
    assert record.resume(ABOUT) == (None, [])
    record.append(1, [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": 0.25}], 1.5)
    record.save({"leg": 1, "task": {"weights": torch.arange(3.0)}})
    kept = record.metrics.read_bytes()
    record.append(2, [{"epoch": 3, "loss": 0.125}], 1.0)
    with record.metrics.open("ab") as file:
        file.write(b'{"epoch": 4, "lo')

    again = RunRecord(record.folder.parents[3], KEY)
    state, troubles = again.resume(ABOUT)
    assert state is not None
    assert troubles == []
    assert torch.equal(state["task"]["weights"], torch.arange(3.0))
    assert again.metrics.read_bytes() == kept
    again.append(2, [{"epoch": 3, "loss": 0.125}], 2.0)
    assert [row["epoch"] for row in again.rows()] == [1, 2, 3]
    timing = [json.loads(line) for line in (record.folder / "timing.jsonl").read_text().splitlines()]
    assert timing == [
        {"leg": 1, "seconds": 1.5, "last_row": 2},
        {"leg": 2, "seconds": 2.0, "last_row": 3},
    ]


def saved(record: RunRecord, legs: int = 2) -> None:
    """A record with a row and a checkpoint for each of so many legs."""
    record.resume(ABOUT)
    for leg in range(1, legs + 1):
        record.append(leg, [{"epoch": leg, "loss": 1 / leg}], 1.0)
        record.save({"leg": leg, "task": {"weights": torch.full((3,), float(leg))}})


def test_every_bit_of_a_checkpoint_counts(record: RunRecord) -> None:
    saved(record)
    path = record.folder / "checkpoint.pt"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert not is_whole(path), f"byte {place}"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert not is_whole(path), f"{size} bytes"
    path.write_bytes(whole)
    assert is_whole(path)


@pytest.mark.parametrize("damaged", [("checkpoint.pt",), ("checkpoint.pt", "checkpoint-before.pt")])
def test_a_damaged_checkpoint_costs_what_came_after_the_one_before(record: RunRecord, damaged: tuple[str, ...]) -> None:
    saved(record)
    for name in damaged:
        content = bytearray((record.folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (record.folder / name).write_bytes(content)
    again = RunRecord(record.folder.parents[3], KEY)
    state, troubles = again.resume(ABOUT)
    assert troubles == [f"{name} is damaged, or rows that it counts are." for name in damaged]
    assert not any((record.folder / name).exists() for name in damaged)
    if len(damaged) == 1:
        assert state is not None
        assert state["leg"] == 1
        assert torch.equal(state["task"]["weights"], torch.ones(3))
        assert [row["epoch"] for row in again.rows()] == [1]
    else:
        assert state is None
        assert again.rows() == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_rows_that_are_not_those_of_the_checkpoint_are_noticed(record: RunRecord, name: str) -> None:
    saved(record)
    path = record.folder / name
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for content, leg in (
        (whole[:-1], 1),
        (whole[:first], 1),
        (whole[: first - 1], 0),
        (b"", 0),
        (whole[:first] + whole[first:].replace(b"2", b"3"), 1),
        (b"[" + whole[1:], 0),
    ):
        copy = RunRecord(record.folder.parents[3] / f"{leg}-{len(content)}-{content[:1]!r}", KEY)
        copy.folder.mkdir(parents=True)
        for file in record.folder.iterdir():
            (copy.folder / file.name).write_bytes(file.read_bytes())
        (copy.folder / name).write_bytes(content)
        state, troubles = copy.resume(ABOUT)
        assert (state["leg"] if state else 0) == leg
        assert len(troubles) == 2 - leg
        assert (copy.folder / name).read_bytes() == whole[: first * leg]


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_a_finished_run_whose_rows_are_others_is_not_finished(record: RunRecord, cut: int) -> None:
    saved(record)
    record.finish(Outcome({}, {}), 0)
    assert record.finished
    content = record.metrics.read_bytes()
    record.metrics.write_bytes(content[:-cut] if cut else content.replace(b"0.5", b"0.6"))
    assert not record.finished
    how = f"{len(content) - cut} bytes where the run wrote {len(content)}" if cut else "other bytes"
    state, troubles = record.resume(ABOUT)
    assert state is None
    assert troubles == [f"metrics.jsonl is not what the run wrote ({how})."]
    assert record.rows() == []
    assert not (record.folder / "result.json").exists()


def finished_with_arrays(record: RunRecord) -> RunRecord:
    saved(record)
    record.finish(Outcome({"accuracy": 90.0, "loss": float("nan")}, {"picture": np.arange(4.0)}), 0)
    return RunRecord(record.folder.parents[3], KEY)


def edited(result: dict[str, Any]) -> None:
    result["numbers"]["accuracy"] = 99.0


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def leave_out(result: dict[str, Any]) -> None:
        for key in keys:
            del result[key]

    return leave_out


@pytest.mark.parametrize("change", [edited, without("sha256"), without("written"), without("written", "sha256")])
def test_a_result_that_was_changed_is_not_believed(record: RunRecord, change: Callable[[dict[str, Any]], None]) -> None:
    again = finished_with_arrays(record)
    assert again.finished
    path = record.folder / "result.json"
    result = read_json(path)
    change(result)
    write_json(path, result)
    assert not again.finished
    state, troubles = again.resume(ABOUT)
    assert state is None
    assert troubles == ["result.json is not what the run wrote (its digest is another, or it has none)."]
    assert not path.exists()


@pytest.mark.parametrize("left_out", ["run.json", "metrics.jsonl", "timing.jsonl"])
def test_a_result_that_does_not_count_every_file_is_not_believed(record: RunRecord, left_out: str) -> None:
    again = finished_with_arrays(record)
    path = record.folder / "result.json"
    result = read_json(path)
    del result["written"][left_out]
    write_json(path, sealed(result))
    assert not again.finished
    assert again.resume(ABOUT) == (None, ["result.json does not count what the run wrote."])


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "timing.jsonl", "arrays.npz", "result.json"])
@pytest.mark.parametrize("how", ["cut", "other", "gone"])
def test_whatever_file_of_a_finished_run_is_damaged_it_begins_again(record: RunRecord, name: str, how: str) -> None:
    again = finished_with_arrays(record)
    path = record.folder / name
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        middle = len(content) // 2
        other = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes(content[:-3] if how == "cut" else other)
    assert not again.finished
    state, troubles = again.resume(ABOUT)
    assert state is None
    if (name, how) == ("result.json", "gone"):  # then it is a run that is not finished
        assert troubles == []
    else:
        assert len(troubles) == 1
        assert troubles[0].startswith(f"{name} ")
    assert again.about == ABOUT
    assert again.rows() == []


def test_weights_alone_may_be_left_behind_but_not_changed(record: RunRecord) -> None:
    """`blockadapt pack` leaves them behind, and no report reads them."""
    saved(record)
    record.finish(Outcome({}, {"weights": np.arange(4.0)}), 0)
    path = record.folder / "arrays.npz"
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    assert not record.finished
    path.unlink()
    assert record.finished


def test_without_a_checkpoint_all_rows_go(record: RunRecord) -> None:
    record.append(1, [{"epoch": 1}], 1.0)
    assert RunRecord(record.folder.parents[3], KEY).resume(ABOUT) == (None, [])
    assert record.metrics.read_bytes() == b""


def test_a_finished_run_holds_its_result_and_no_checkpoint(record: RunRecord) -> None:
    record.resume(ABOUT)
    record.append(1, [{"epoch": 1}], 1.25)
    record.append(2, [{"epoch": 2}], 0.5)
    record.save({"leg": 2})
    record.error.write_text("an old failure")
    assert (record.begun, record.finished) == (True, False)
    numbers = {"steps": np.int64(7), "loss": torch.tensor(0.5), "diverged": 0}
    record.finish(Outcome(numbers, {"weights": np.arange(4, dtype=np.float32)}), 123)
    assert (record.begun, record.finished) == (False, True)
    assert names(record.folder) == {"run.json", "metrics.jsonl", "timing.jsonl", "result.json", "arrays.npz"}
    result = read_json(record.folder / "result.json")
    assert result["numbers"] == {"steps": 7, "loss": 0.5, "diverged": 0}
    assert (result["seconds"], result["peak_memory_bytes"]) == (1.75, 123)
    with np.load(record.folder / "arrays.npz", allow_pickle=False) as archive:
        assert archive.files == ["weights"]
        np.testing.assert_array_equal(archive["weights"], np.arange(4, dtype=np.float32))


def test_arrays_have_the_same_bytes_at_any_time(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for clock in (1e9, 1.7e9):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        monkeypatch.setattr("time.localtime", lambda *_: (int(clock), 1, 1, 0, 0, 0, 0, 1, 0))  # noqa: B023
        record.resume(ABOUT)
        record.finish(Outcome({}, {"a": np.arange(3), "b": np.eye(2)}), 0)
        found.append((record.folder / "arrays.npz").read_bytes())
    assert found[0] == found[1]
    with zipfile.ZipFile(record.folder / "arrays.npz") as archive:
        assert archive.testzip() is None


def test_values_that_are_not_finite_come_back(record: RunRecord) -> None:
    record.resume(ABOUT)
    record.append(1, [{"epoch": 1, "loss": float("nan"), "best": float("inf")}], 0.0)
    (row,) = record.rows()
    assert np.isnan(row["loss"])
    assert row["best"] == float("inf")


def test_a_run_that_goes_on_keeps_what_it_was_begun_with(record: RunRecord) -> None:
    saved(record)
    state, _ = record.resume({**ABOUT, "environment": {"threads": 1}})
    assert state is not None
    assert record.about == ABOUT
    before = {path: path.read_bytes() for path in record.folder.iterdir()}
    with pytest.raises(ValueError, match=r"^") as refusal:
        record.resume({**ABOUT, "lr": 0.2})
    assert str(refusal.value) == "run: `lr` must be 0.1 as in what adam, seed 3 was begun with, got 0.2."
    assert {path: path.read_bytes() for path in record.folder.iterdir()} == before


def test_a_run_that_begins_again_is_of_here_and_now(record: RunRecord) -> None:
    """It was killed before its first checkpoint, so nothing of it was made elsewhere."""
    record.resume(ABOUT)
    record.append(1, [{"epoch": 1}], 1.0)
    here = {**ABOUT, "environment": {"threads": 1}}
    assert record.resume(here) == (None, [])
    assert record.about == here
    with pytest.raises(ValueError, match=r"`lr` must be 0\.1 as in what adam, seed 3 was begun with"):
        record.resume({**here, "lr": 0.2})


def test_a_directory_takes_one_experiment(tmp_path: Path) -> None:
    about = {
        "experiment": "x",
        "scale": "smoke",
        "settings": {"epochs": 3, "optimizer": {"eps": 0.1}},
        "tune": False,
        "command": "blockadapt run x",
        "environment": {},
    }
    begin_experiment(tmp_path, about)
    begin_experiment(tmp_path, {**about, "command": "blockadapt run x --jobs 2", "environment": {"threads": 1}})
    assert about.items() <= read_experiment(tmp_path, "test", {}).items()
    for changed, sentence in (
        ({"scale": "paper"}, "run: `scale` must be 'smoke' as in the runs in {out}, got 'paper'."),
        (
            {"settings": {"epochs": 3, "optimizer": {"eps": 0.2}}},
            "run: `optimizer.eps` must be 0.1 as in the runs in {out}, got 0.2.",
        ),
        ({"settings": {"optimizer": {"eps": 0.1}}}, "run: `epochs` must be 3 as in the runs in {out}, got nothing."),
        ({"tune": True}, "run: `tune` must be False as in the runs in {out}, got True."),
    ):
        with pytest.raises(ValueError, match=r"^") as refusal:
            begin_experiment(tmp_path, {**about, **changed})
        assert str(refusal.value) == sentence.format(out=tmp_path)
    assert about.items() <= read_experiment(tmp_path, "test", {}).items()


def test_a_directory_of_old_takes_more_and_is_not_sealed_by_it(tmp_path: Path) -> None:
    """A seal of today would vouch for what nobody has checked."""
    asked = [{"optimizers": ["adam"], "variants": [""], "seeds": [0]}]
    about = {
        "experiment": "x",
        "settings": {"seeds": [0]},
        "asked": asked,
        "code": {},
        "command": "one",
        "environment": {},
    }
    write_json(tmp_path / "experiment.json", about)
    more = {**about, "settings": {"seeds": [1]}, "asked": [{**asked[0], "seeds": [1]}], "command": "two"}
    begin_experiment(tmp_path, more)
    found = read_json(tmp_path / "experiment.json")
    assert found == {**about, "settings": {"seeds": [0, 1]}, "asked": [*asked, *more["asked"]], "command": "one\ntwo"}


HOLDER = """
import sys, time
from pathlib import Path
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_process_that_was_killed_is_free(record: RunRecord) -> None:
    command = [sys.executable, "-c", HOLDER, str(record.folder / ".lock")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == "held\n"
        with record.locked() as ours:
            assert not ours
        holder.kill()
        holder.wait()
    with record.locked() as ours:
        assert ours
        with RunRecord(record.folder.parents[3], KEY).locked() as second:
            assert not second
    with record.locked() as ours:
        assert ours


def test_rows_are_on_disk_as_soon_as_they_are_appended(record: RunRecord) -> None:
    record.resume(ABOUT)
    for leg in range(1, 4):
        record.append(leg, [{"epoch": leg}], 0.0)
        assert len(record.metrics.read_text().splitlines()) == leg
    assert os.path.getsize(record.metrics) == len(b'{"epoch": 1}\n') * 3
