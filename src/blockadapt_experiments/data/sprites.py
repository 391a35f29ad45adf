"""Draws squares, ellipses and hearts on a grid of factors, or reads them from the published dSprites file.

What is drawn here is *dSprites-like*: the same factors with the same values, in the same order, and shapes of nearly
the same size. It is not dSprites, and neither is ever called by the other's name.

    shape         square of side 19.2 s; ellipse of semi-axes 12.8 s and 7.2 s; heart, in a box of 19.2 s × 19.2 s
    scale         s = 0.5, 0.6, …, 1
    orientation   40 angles from 0 to 2π counterclockwise, both included: the first and the last are the same image
    x, y          the centre is at 16 + 32p pixels from the left and from the top, p = 0, 1/31, …, 1

A pixel is on if its centre is inside. An image is a bit a pixel in memory: the full grid takes 377 MB, not 3 GB.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from blockadapt.validation import require, require_choice
from blockadapt_experiments.data.fingerprints import fingerprint, note
from blockadapt_experiments.data.missing import MissingData

FACTORS = ("shape", "scale", "orientation", "x", "y")
SIZES = (3, 6, 40, 32, 32)
"""Values of each factor on the full grid, whose last factor runs fastest: 737,280 images."""

NAMES = {"dsprites-like": "dSprites-like", "dsprites": "dSprites"}
"""By the name in settings, the name for people."""

SIDE = 64
HEART_BOTTOM, HEART_TOP = -17.0, 11.923252415335437
"""Least and greatest Y of the heart's curve X = 16 sin³t, Y = 13 cos t − 5 cos 2t − 2 cos 3t − cos 4t."""

REACH = 14
"""No shape has a pixel further than this from the one that its centre is in, along an axis."""

CHUNK = 4096
"""Images drawn or read at once: some tens of megabytes."""


@dataclass(frozen=True, eq=False)
class Sprites:
    """Holds images of all combinations of values of the five factors, the last factor fastest.

    Attributes:
        name: Which data set it is, for people.
        sizes: How many values each factor has.
        packed: The pixels by rows, eight in a byte, [count, 512].
    """

    name: str
    sizes: tuple[int, ...]
    packed: np.ndarray

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def classes(self) -> np.ndarray:
        """Tell which value of each factor an image has, [count, 5]."""
        return grid(self.sizes)

    def images(self, rows: Tensor) -> Tensor:
        """Return these images, float32 [len(rows), 1, 64, 64] of zeros and ones."""
        pixels = np.unpackbits(self.packed[rows.numpy()], axis=1)
        return torch.from_numpy(pixels).to(torch.float32).view(-1, 1, SIDE, SIDE)


def load_sprites(data: str, values: tuple[int, ...], data_dir: Path | None = None) -> Sprites:
    """Load images of a part of the grid.

    Args:
        data: "dsprites-like", which is drawn, or "dsprites", which is read from a file.
        values: How many values of each factor are kept; which, says `spread`.
        data_dir: A folder with the published `dsprites*.npz`, or with a folder `dsprites` that has it.

    Raises:
        MissingData: There is no such file.
        ValueError: There is, and it does not hold a grid of images; or it has fewer values than are to be kept.
    """
    require_choice("data", "data", data, tuple(NAMES))
    sprites, digest = _loaded(data, values, data_dir)
    note(data, digest)
    return sprites


@lru_cache(maxsize=1)
def _loaded(data: str, values: tuple[int, ...], data_dir: Path | None) -> tuple[Sprites, str]:
    """Load the images, with the digest of their pixels."""
    sprites = _made(data, values, data_dir)
    return sprites, fingerprint([sprites.packed])


def _made(data: str, values: tuple[int, ...], data_dir: Path | None) -> Sprites:
    if data == "dsprites":
        return _read(_file(data_dir), values)
    parts = (_packed(render(chunk)) for chunk in np.array_split(_kept(SIZES, values), _chunks(math.prod(values))))
    return Sprites(NAMES[data], values, np.concatenate(list(parts)))


def grid(sizes: Sequence[int]) -> np.ndarray:
    """List all combinations of `sizes` values of the factors, [count, factors], the last factor fastest."""
    return np.stack(np.unravel_index(np.arange(math.prod(sizes)), tuple(sizes)), axis=1)


def spread(factor: str, size: int, kept: int) -> np.ndarray:
    """Choose `kept` of `size` values, evenly spread from the first to the last.

    Angles go round, and the last is the first again: among fewer of them it is left out.

    Raises:
        ValueError: There are not that many.
    """
    require(1 <= kept <= size, "data", f"values of {factor}", f"in [1, {size}]", kept)
    if factor == "orientation":
        return np.arange(kept) * size // kept
    chosen: np.ndarray = np.linspace(0, size - 1, kept).round().astype(np.int64)
    return chosen


def _kept(sizes: Sequence[int], values: Sequence[int]) -> np.ndarray:
    """Return the part of a grid that is kept, as classes of the full grid, [count, factors]."""
    spreads = [spread(*each) for each in zip(FACTORS, sizes, values, strict=True)]
    return np.stack([chosen[column] for chosen, column in zip(spreads, grid(values).T, strict=True)], axis=1)


def _chunks(count: int) -> int:
    return math.ceil(count / CHUNK)


def _packed(images: np.ndarray) -> np.ndarray:
    return np.packbits(images.reshape(len(images), SIDE * SIDE), axis=1)


# Drawn --------------------------------------------------------------------------------------------------------------


def _in_square(X: np.ndarray, Y: np.ndarray) -> Any:
    return np.maximum(np.abs(X), np.abs(Y)) <= 9.6


def _in_ellipse(X: np.ndarray, Y: np.ndarray) -> Any:
    return (X / 12.8) ** 2 + (Y / 7.2) ** 2 <= 1


def _in_heart(X: np.ndarray, Y: np.ndarray) -> Any:
    """Tell which points lie between the curve's two branches, which are E ± O with c = |cos t|, where 16 sin³t = |X|.

    E = −5 cos 2t − cos 4t is the same on both, O = 13c − 2 cos 3t changes its sign.
    """
    height = HEART_TOP - HEART_BOTTOM
    X, Y = X * (32 / 19.2), Y * (height / 19.2) + (HEART_TOP + HEART_BOTTOM) / 2
    squared = 1 - np.cbrt(np.abs(X) / 16) ** 2  # c²; negative outside the box
    c = np.sqrt(np.maximum(squared, 0))
    E = 4 - 2 * c**2 - 8 * c**4
    O = 19 * c - 8 * c**3
    return (squared >= 0) & (np.abs(Y - E) <= O)


INSIDE: tuple[Callable[[np.ndarray, np.ndarray], Any], ...] = (_in_square, _in_ellipse, _in_heart)
"""For each shape at scale 1, unturned: whether a point is inside. X grows to the right, Y upwards."""


def render(classes: np.ndarray) -> np.ndarray:
    """Draw images of the full grid.

    Args:
        classes: Which value each of the five factors has, [count, 5].

    Returns:
        The images, bool [count, 64, 64], from the top to the bottom and from the left to the right.
    """
    images = np.zeros((len(classes), SIDE, SIDE), dtype=bool)
    for shape, inside in enumerate(INSIDE):
        (rows,) = np.nonzero(classes[:, 0] == shape)
        scale, orientation, x, y = classes[rows, 1:].T
        s = 0.5 + 0.1 * scale
        angle = 2 * np.pi / 39 * (orientation % 39)  # the last as exactly the first
        left, top = (16 + 32 / 31 * each for each in (x, y))
        # Only pixels near the shape: a fifth of all.
        columns, lines = (each.astype(np.int64)[:, None] + np.arange(-REACH, REACH + 1) for each in (left, top))
        right = (columns + 0.5 - left[:, None])[:, None, :] / s[:, None, None]
        up = (top[:, None] - lines - 0.5)[:, :, None] / s[:, None, None]
        cos, sin = (function(angle)[:, None, None] for function in (np.cos, np.sin))
        on = inside(right * cos + up * sin, up * cos - right * sin)
        images[rows[:, None, None], lines[:, :, None], columns[:, None, :]] = on
    return images


# Read ---------------------------------------------------------------------------------------------------------------


def _file(data_dir: Path | None) -> Path:
    folders = (data_dir / "dsprites", data_dir) if data_dir else ()
    for folder in folders:
        found = sorted(folder.glob("dsprites*.npz"))
        require(len(found) < 2, "data", "data-dir", "a folder with one dsprites*.npz", ", ".join(map(str, found)))
        if found:
            return found[0]
    where = f"in {data_dir}" if data_dir else "because no folder was given"
    raise MissingData(
        f"data: dSprites was not found {where}; put its published dsprites*.npz into DIR and give --data-dir DIR, or "
        'take --set data="dsprites-like", which is drawn and needs no file.'
    )


def _read(path: Path, values: Sequence[int]) -> Sprites:
    """Read the part of the file's grid that is kept, in the order of the grid, whatever the order of the file.

    Raises:
        ValueError: The file is damaged, or is another one.
    """
    try:
        # Opened here, because NumPy leaves a damaged file open. It reads members as they are asked for.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            classes = np.asarray(archive["latents_classes"])[:, -len(FACTORS) :]  # the first is a colour, always white
        sizes = tuple(int(size) for size in classes.max(axis=0) + 1)
        place = np.ravel_multi_index(tuple(classes.T), sizes)
        complete = np.array_equal(np.sort(place), np.arange(math.prod(sizes)))
        require(complete, "data", str(path), "a file with each combination of factors once", f"{len(place)} of them")
        wanted = np.full(len(place), -1)
        wanted[np.ravel_multi_index(tuple(_kept(sizes, values).T), sizes)] = np.arange(math.prod(values))
        packed = np.zeros((math.prod(values), SIDE * SIDE // 8), dtype=np.uint8)
        for first, images in _stored_images(path, len(place)):
            target = wanted[place[first : first + len(images)]]
            packed[target[target >= 0]] = _packed(images[target >= 0])
    except (zipfile.BadZipFile, KeyError, IndexError, EOFError) as error:
        raise ValueError(f"data: {path} cannot be read as dSprites: {error}") from error
    return Sprites(NAMES["dsprites"], tuple(values), packed)


def _stored_images(path: Path, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the images chunk by chunk, each with its first row; NumPy itself would read all 3 GB at once.

    Raises:
        EOFError: The file ends before its last image.
    """
    with zipfile.ZipFile(path) as archive, archive.open("imgs.npy") as file:
        shape, dtype = _header(file)
        rule = f"uint8 of shape {(count, SIDE, SIDE)}"
        require(shape == (count, SIDE, SIDE) and dtype == np.uint8, "data", f"imgs of {path}", rule, f"{dtype} {shape}")
        for first in range(0, count, CHUNK):
            images = min(CHUNK, count - first)
            pixels = file.read(images * SIDE * SIDE)
            if len(pixels) < images * SIDE * SIDE:
                raise EOFError("its images end early")
            yield first, np.frombuffer(pixels, dtype=np.uint8).reshape(images, SIDE, SIDE)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and type of the array in a `.npy` file, which is then at its first element."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    require(not by_columns, "data", "imgs", "stored by rows", "columns")
    return shape, dtype
