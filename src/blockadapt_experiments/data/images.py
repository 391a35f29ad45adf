"""Reads image data sets: from the Hugging Face hub, from the same Parquet files in a folder, or embedded.

Decoding 60,000 PNGs takes seconds and is done once: the pixels are kept in the user's cache, under a key that changes
with the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import os
import queue
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from filelock import FileLock

from blockadapt.validation import Described, require, require_choice
from blockadapt_experiments.data.digits import digits
from blockadapt_experiments.data.examples import Examples
from blockadapt_experiments.data.fingerprints import fingerprint, note
from blockadapt_experiments.data.missing import MissingData
from blockadapt_experiments.files.atomic import atomic
from blockadapt_experiments.parts import register

HUB = {"mnist": "ylecun/mnist", "cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
"""Hub id by the name used here."""

HUB_PATIENCE = 5.0
"""Seconds to wait for the hub's first answer."""

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}
"""[channels, height, width] of the images of each data set."""

CLASSES = {"mnist": 10, "cifar10": 10, "cifar100": 100}

Load = Callable[[Path | None], tuple[Examples, Examples]]
LoadT = TypeVar("LoadT", bound=Load)

OWN: dict[str, Load] = {}
"""Data sets that users have registered."""

SPLITS = ("train", "test")
PARTS = ("images", "labels")
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")


def load_images(name: str, data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Load training and test images of a data set, uint8 [count, channels, height, width], with their labels.

    Args:
        name: "mnist", "cifar10", "cifar100", or "digits", which is embedded.
        data_dir: A folder with `<name>/train-*.parquet` and `<name>/test-*.parquet`, or with these files themselves;
            None for the hub.

    Raises:
        MissingData: It is not there.
        ValueError: It is there and is not images with labels.
    """
    require_choice("data", "name", name, (*HUB, "digits", *OWN))
    train, test, digest = _loaded(name, data_dir)
    note(name, digest)
    return train, test


@lru_cache(maxsize=2)
def _loaded(name: str, data_dir: Path | None) -> tuple[Examples, Examples, str]:
    """Load both sets, with the digest of their pixels and labels."""
    if name in OWN:
        train, test = _own(name, data_dir)
    else:
        train, test = _embedded() if name == "digits" else _stored(name, data_dir)
    digest = fingerprint(part.numpy() for part in (train.images, train.labels, test.images, test.labels))
    return train, test, digest


def register_images(name: str) -> Callable[[LoadT], LoadT]:
    """Make the decorated function's data set known by a name, to every experiment that has a setting `data`.

    The function takes the folder of `--data-dir`, or None, and gives `Examples` to train on and others to test on. A
    run keeps the digest of what it gave.

    Raises:
        ValueError: The name is taken.
    """

    def decorate(load: LoadT) -> LoadT:
        register("images", name, (*HUB, "digits"), load)
        OWN[name] = load
        _loaded.cache_clear()
        return load

    return decorate


def require_images(owner: str, name: str, built_in: Sequence[str] = (*HUB, "digits")) -> None:
    """Raise ValueError unless there is such a data set, built in or registered."""
    require_choice(owner, "data", name, (*built_in, *OWN))


def _own(name: str, data_dir: Path | None) -> tuple[Examples, Examples]:
    """Load what a user has registered, and make sure that it is images with labels."""
    sets = OWN[name](data_dir)
    for split, examples in zip(SPLITS, sets, strict=True):
        count, labels = len(examples.images), examples.labels
        ok = count == len(labels) > 0 and labels.ndim == 1 and labels.dtype == torch.int64
        shape = Described(f"{count} images and labels {list(labels.shape)} of {labels.dtype}")
        require(ok, name, split, "one or more images with as many labels, int64", shape)
    return sets


def _embedded() -> tuple[Examples, Examples]:
    embedded = digits()
    return _in_bytes(embedded.train), _in_bytes(embedded.test)


def _stored(name: str, data_dir: Path | None) -> tuple[Examples, Examples]:
    if data_dir is None:
        splits = _from_hub(name)
        key = "-".join(split._fingerprint for split in splits.values())
        read: Callable[[str], Any] = lambda split: splits[split].with_format("arrow")[:]  # noqa: E731
    else:
        paths = _files(name, data_dir)
        key = _fingerprint(path for split in SPLITS for path in paths[split])
        read = lambda split: _read_parquet(paths[split])  # noqa: E731
    arrays = _decoded_once(name, key, read)
    for split in SPLITS:
        _require_fitting(name, split, arrays[f"{split}_images"], arrays[f"{split}_labels"])
    train, test = (Examples(*(torch.from_numpy(arrays[f"{split}_{part}"]) for part in PARTS)) for split in SPLITS)
    return train, test


def _require_fitting(name: str, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Raise unless images and labels can be those of the data set."""
    shape = tuple(images.shape[1:])
    require(shape == SHAPES[name], "data", f"{split} images of {name}", f"of shape {SHAPES[name]}", shape)
    found = (int(labels.min()), int(labels.max()))
    rule = f"in [0, {CLASSES[name] - 1}]"
    require(found[0] >= 0 and found[1] < CLASSES[name], "data", f"{split} labels of {name}", rule, found)


def _in_bytes(examples: Examples) -> Examples:
    return Examples((255 * examples.images).round().to(torch.uint8), examples.labels)


def _way_out(name: str, where: str) -> str:
    return (
        f"data: {name} was not found {where}; put its train-*.parquet and test-*.parquet (hub id {HUB[name]}) into "
        f"DIR/{name} and give --data-dir DIR, or leave --data-dir out and be online once to have it downloaded."
    )


def _files(name: str, data_dir: Path) -> dict[str, list[Path]]:
    for folder in (data_dir / name, data_dir):
        found = {split: sorted(folder.glob(f"{split}-*.parquet")) for split in SPLITS}
        if all(found.values()):
            return found
    raise MissingData(_way_out(name, f"in {data_dir}"))


def _read_parquet(paths: Sequence[Path]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.concat_tables(pyarrow.parquet.read_table(path) for path in paths)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"data: {', '.join(map(str, paths))} cannot be read as Parquet: {error}") from error


def _from_hub(name: str) -> dict[str, Any]:
    """Load the splits; download them unless the hub's own cache has them.

    Raises:
        MissingData: The hub does not answer, and its cache has nothing. The message says where to get it.
    """
    if "HF_HUB_OFFLINE" not in os.environ and not _hub_answers():
        os.environ["HF_HUB_OFFLINE"] = "1"  # else half a minute of attempts; what was downloaded before is still found
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        splits = {split: datasets.load_dataset(HUB[name], split=split) for split in SPLITS}
    except Exception as error:  # whatever the network, the hub or its cache raise: the way out is the same
        raise MissingData(_way_out(name, f"on the hub ({type(error).__name__})")) from error
    column = _column(splits["train"].column_names, IMAGE_COLUMNS)
    return {split: table.cast_column(column, datasets.Image(decode=False)) for split, table in splits.items()}


def _hub_answers() -> bool:
    """Ask the hub once. The name's lookup and each of its addresses have times of their own, so another thread asks."""
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask() -> None:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        try:
            with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_PATIENCE):
                answers.put(True)
        except urllib.error.HTTPError:  # an answer, if not a kind one
            answers.put(True)
        except (OSError, http.client.HTTPException, ValueError):
            answers.put(False)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=HUB_PATIENCE)
    except queue.Empty:
        return False


def _fingerprint(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()[:32]


def cache_folder() -> Path:
    """Tell where decoded images are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return Path(base or Path.home() / ".cache") / "blockadapt" / "images"


def _decoded_once(name: str, key: str, read: Callable[[str], Any]) -> dict[str, np.ndarray]:
    """Take pixels and labels from the cache, or decode them into it. Of several processes, one decodes.

    What is in the cache and is damaged is decoded anew. Where there is no room or no right to write, nothing is kept.
    """
    path = cache_folder() / f"{name}-{key}.npz"
    decoded = None
    with contextlib.suppress(OSError):
        _make_private(path.parent)
        with FileLock(f"{path}.lock"):
            cached = _cached(path)
            if cached:
                return cached
            decoded = _decoded(read)
            with atomic(path) as file:
                np.savez(file, allow_pickle=False, **decoded)
    return decoded or _decoded(read)


def _make_private(folder: Path) -> None:
    """Make the folder, and `blockadapt` above it, for this user alone: compiled kernels lie in the same one."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)


def _cached(path: Path) -> dict[str, np.ndarray] | None:
    """Read what the cache holds; None if that is nothing, or is damaged: the archive has a checksum for each array."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {f"{split}_{part}": archive[f"{split}_{part}"] for split in SPLITS for part in PARTS}
    except Exception:  # however a damaged archive shows itself
        return None


def _decoded(read: Callable[[str], Any]) -> dict[str, np.ndarray]:
    arrays = {}
    for split in SPLITS:
        table = read(split)
        labels = table[_column(table.column_names, LABEL_COLUMNS)]
        require(len(labels) > 0, "data", f"{split} images", "at least one", 0)
        require(labels.null_count == 0, "data", f"{split} labels", "one for each image", Described("none for some"))
        images = table[_column(table.column_names, IMAGE_COLUMNS)].to_pylist()
        pixels = [_decoded_image(split, row, image) for row, image in enumerate(images)]
        shapes = sorted({image.shape for image in pixels})
        require(len(shapes) == 1, "data", f"{split} images", "of one shape", shapes)
        arrays[f"{split}_images"] = np.stack(pixels)
        arrays[f"{split}_labels"] = labels.to_numpy().astype(np.int64)
    return arrays


def _decoded_image(split: str, row: int, image: Any) -> np.ndarray:
    png = image.get("bytes") if isinstance(image, dict) else None
    if not png:
        raise ValueError(f"data: {split} image {row} has no bytes.")
    try:
        return _pixels(png)
    except Exception as error:  # Pillow has no one name for a damaged image
        raise ValueError(f"data: {split} image {row} cannot be decoded ({type(error).__name__}).") from error


def _pixels(png: bytes) -> np.ndarray:
    """Return an image's pixels [channels, height, width]."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image)
    return pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _column(names: Iterable[str], wanted: Iterable[str]) -> str:
    found = [name for name in wanted if name in names]
    if not found:
        raise ValueError(f"data: the table must have a column {' or '.join(wanted)}, got {', '.join(names)}.")
    return found[0]
