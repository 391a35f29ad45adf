"""Image data: the pixels and labels that went in, from every place they may lie in, decoded once."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from blockadapt_experiments.data import images
from blockadapt_experiments.data.digits import digits
from blockadapt_experiments.data.fingerprints import data_read
from blockadapt_experiments.data.images import cache_folder, load_images
from blockadapt_experiments.data.missing import MissingData
from support.images import png, write_images


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images._loaded.cache_clear()


def random_images(count: int, seed: int, *channels: int) -> np.ndarray:
    side = 32 if channels else 28
    shape = (count, side, side, *channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


GREY, GREY_TEST = random_images(11, 1), random_images(4, 2)


def write_mnist(folder: Path) -> None:
    write_images(folder, "train", GREY, parts=2)
    write_images(folder, "test", GREY_TEST)


def expect_mnist(data_dir: Path | None) -> None:
    train, test = load_images("mnist", data_dir)
    assert train.images.dtype == test.images.dtype == torch.uint8
    np.testing.assert_array_equal(train.images.numpy(), GREY[:, np.newaxis])
    np.testing.assert_array_equal(test.images.numpy(), GREY_TEST[:, np.newaxis])
    assert train.labels.tolist() == [row % 7 for row in range(11)]
    assert test.labels.dtype == torch.int64


@pytest.mark.parametrize("below", ["mnist", "."])
def test_pixels_come_from_a_folder_of_data_sets_or_from_the_files_themselves(tmp_path: Path, below: str) -> None:
    write_mnist(tmp_path / "data" / below)
    expect_mnist(tmp_path / "data")


def test_colours_and_the_column_names_of_cifar(tmp_path: Path) -> None:
    train, test = random_images(5, 3, 3), random_images(2, 4, 3)
    for name, label in (("cifar10", "label"), ("cifar100", "fine_label")):
        write_images(tmp_path / name, "train", train, image="img", label=label)
        write_images(tmp_path / name, "test", test, image="img", label=label)
        found, found_test = load_images(name, tmp_path)
        np.testing.assert_array_equal(found.images.numpy(), train.transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(found_test.images.numpy(), test.transpose(0, 3, 1, 2))
        assert found.images.shape == (5, 3, 32, 32)
        assert found.labels.tolist() == [0, 1, 2, 3, 4]


def test_images_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist")
    decoded = []
    real = images._pixels
    monkeypatch.setattr(images, "_pixels", lambda png: (decoded.append(1), real(png))[1])
    expect_mnist(tmp_path)
    assert len(decoded) == 15
    images._loaded.cache_clear()
    expect_mnist(tmp_path)
    assert len(decoded) == 15


def test_other_files_are_other_images(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    expect_mnist(tmp_path)
    before = os.stat(tmp_path / "mnist" / "test-00000-of-00001.parquet")
    write_images(tmp_path / "mnist", "test", 255 - GREY_TEST)
    os.utime(tmp_path / "mnist" / "test-00000-of-00001.parquet", ns=(before.st_atime_ns, before.st_mtime_ns))
    images._loaded.cache_clear()
    _, test = load_images("mnist", tmp_path)
    np.testing.assert_array_equal(test.images.numpy(), 255 - GREY_TEST[:, np.newaxis])


def test_without_a_cache_to_write_to_it_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_mnist(tmp_path / "mnist")
    expect_mnist(tmp_path)
    assert (tmp_path / "file").is_file()


def test_the_hub_is_asked_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes a folder of the hub's name for the hub itself, so no network is needed."""
    write_mnist(tmp_path / "ylecun" / "mnist")
    program = (
        "import sys, numpy; from pathlib import Path; from blockadapt_experiments.data.images import load_images; "
        "train, test = load_images('mnist'); numpy.savez('found.npz', train=train.images, test=test.images, "
        "labels=train.labels)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_array_equal(found["train"], GREY[:, np.newaxis])
        np.testing.assert_array_equal(found["test"], GREY_TEST[:, np.newaxis])
        assert found["labels"].tolist() == [row % 7 for row in range(11)]
    assert len(list((tmp_path / "cache" / "blockadapt" / "images").glob("mnist-*.npz"))) == 1


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    """Everything that `datasets` would try again for half a minute is left out."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    asked.append(server.accept()[0].close())

        threading.Thread(target=hang_up, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"}
        program = "from blockadapt_experiments.data.images import load_images; load_images('mnist')"
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, encoding="utf-8", check=False
        )
        server.shutdown(socket.SHUT_RDWR)
    assert "MissingData: data: mnist was not found on the hub" in done.stderr
    assert len(asked) == 1


def test_a_network_that_drops_every_packet_costs_no_more_than_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name has many addresses, and each attempt would have the patience for itself."""
    monkeypatch.setattr(images, "HUB_PATIENCE", 0.2)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # what it was comes back at the end
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(disable_progress_bars=lambda: None))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes the connection, and never answers
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        real = socket.create_connection

        def each_address(*arguments: Any, **options: Any) -> socket.socket:
            time.sleep(20 * 0.2)
            return real(*arguments, **options)

        for connect in (real, each_address):
            monkeypatch.delenv("HF_HUB_OFFLINE")
            monkeypatch.setattr(socket, "create_connection", connect)
            start = time.monotonic()
            with pytest.raises(MissingData, match=r"^data: mnist was not found on the hub .*\.$"):
                load_images("mnist")
            assert time.monotonic() - start < 2


def test_a_missing_folder_says_both_ways(tmp_path: Path) -> None:
    with pytest.raises(MissingData) as missing:
        load_images("mnist", tmp_path)
    assert str(missing.value) == (
        f"data: mnist was not found in {tmp_path}; put its train-*.parquet and test-*.parquet (hub id ylecun/mnist) "
        "into DIR/mnist and give --data-dir DIR, or leave --data-dir out and be online once to have it downloaded."
    )


def test_half_a_data_set_is_a_missing_one(tmp_path: Path) -> None:
    write_images(tmp_path / "mnist", "train", GREY)
    with pytest.raises(MissingData, match="mnist was not found"):
        load_images("mnist", tmp_path)


def test_files_that_are_no_images_are_named(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    damaged = tmp_path / "mnist" / "train-00001-of-00002.parquet"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"train-00001-of-00002.parquet cannot be read as Parquet"):
        load_images("mnist", tmp_path)
    write_images(tmp_path / "other" / "mnist", "train", GREY, image="picture")
    write_images(tmp_path / "other" / "mnist", "test", GREY, image="picture")
    with pytest.raises(ValueError, match=r"^data: the table must have a column image or img, got picture, label\.$"):
        load_images("mnist", tmp_path / "other")
    assert not list(cache_folder().glob("*.npz"))


def one_wrong(folder: Path, change: Callable[[list[Any]], None]) -> None:
    """MNIST whose rows, as (image, label), were changed in the training file."""
    write_images(folder / "mnist", "test", GREY_TEST)
    rows = [[{"bytes": png(image), "path": ""}, label] for label, image in enumerate(GREY_TEST)]
    change(rows)
    table = pa.table({name: [row[place] for row in rows] for place, name in enumerate(("image", "label"))})
    pyarrow.parquet.write_table(table, folder / "mnist" / "train-0.parquet")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ([{"bytes": None, "path": "1.png"}, 1], "data: train image 1 has no bytes."),
        ([None, 1], "data: train image 1 has no bytes."),
        ([{"bytes": b"no picture", "path": ""}, 1], "data: train image 1 cannot be decoded (UnidentifiedImageError)."),
        ([{"bytes": png(GREY[0])[:200], "path": ""}, 1], "data: train image 1 cannot be decoded (OSError)."),
        ([{"bytes": png(GREY[0, :9]), "path": ""}, 1], "data: `train images` must be of one shape, got "),
        (
            [{"bytes": png(GREY[0]), "path": ""}, None],
            "data: `train labels` must be one for each image, got none ",
        ),
        ([{"bytes": png(GREY[0]), "path": ""}, 10], "data: `train labels of mnist` must be in [0, 9], got (0, 10)."),
        ([{"bytes": png(GREY[0]), "path": ""}, -1], "data: `train labels of mnist` must be in [0, 9], got (-1, 3)."),
    ],
)
def test_a_damaged_image_gets_one_sentence(tmp_path: Path, row: list[Any], sentence: str) -> None:
    one_wrong(tmp_path, lambda rows: rows.__setitem__(1, row))
    with pytest.raises(ValueError, match=r"^data: [^\n]*\.$") as refused:
        load_images("mnist", tmp_path)
    assert str(refused.value).startswith(sentence)


def test_images_of_another_data_set_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_images(tmp_path / "mnist", split, random_images(3, 3, 3), image="img")
    sentence = r"^data: `train images of mnist` must be of shape \(1, 28, 28\), got \(3, 32, 32\)\.$"
    with pytest.raises(ValueError, match=sentence):
        load_images("mnist", tmp_path)


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    expect_mnist(tmp_path)
    (cached,) = cache_folder().glob("*.npz")
    whole = cached.read_bytes()
    flipped = bytearray(whole)
    flipped[500] ^= 1
    for damaged in (b"", b"nonsense", whole[:1000], bytes(flipped)):
        cached.write_bytes(damaged)
        images._loaded.cache_clear()
        expect_mnist(tmp_path)
        assert cached.read_bytes() == whole


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_the_cache_is_for_its_user_alone(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    before = os.umask(0o002)
    try:
        expect_mnist(tmp_path)
    finally:
        os.umask(before)
    for folder in (cache_folder(), cache_folder().parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_same_pixels_have_the_same_digest_wherever_they_lie(tmp_path: Path) -> None:
    found = []
    for name, parts, change in (("a", 1, 0), ("b", 3, 0), ("c", 1, 1)):
        write_images(tmp_path / name / "mnist", "train", GREY ^ change, parts=parts)
        write_images(tmp_path / name / "mnist", "test", GREY_TEST)
        for _ in range(2):  # from the files, then from memory
            with data_read() as read:
                load_images("mnist", tmp_path / name)
            found.append(read["mnist"])
    assert found[0] == found[1] == found[2] == found[3] != found[4] == found[5]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^data: `name` must be one of 'mnist', 'cifar10', 'cifar100', 'digits'"):
        load_images("svhn")


def test_digits_are_embedded() -> None:
    train, test = load_images("digits")
    assert train.images.dtype == torch.uint8
    assert train.images.shape == (1347, 1, 8, 8)
    assert int(train.images.max()) == 255
    embedded = digits()
    assert torch.equal((test.images * (16 / 255)).round() / 16, embedded.test.images)  # nothing is lost in a byte
    assert torch.equal(train.labels, embedded.train.labels)
