"""Image data: the pixels and labels that went in, from every place they may lie in, decoded once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from blockadapt_experiments.data import images
from blockadapt_experiments.data.digits import digits
from blockadapt_experiments.data.images import cache_folder, load_images
from blockadapt_experiments.data.missing import MissingData
from support.images import write_images


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images._loaded.cache_clear()


def random_images(count: int, seed: int, *channels: int) -> np.ndarray:
    shape = (count, 6, 5, *channels)
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
        assert found.images.shape == (5, 3, 6, 5)
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
