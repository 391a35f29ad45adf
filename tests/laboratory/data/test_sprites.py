from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.path import Path as MplPath
from numpy.lib import format as npy
from scipy.ndimage import label

from blockadapt_experiments.data import sprites
from blockadapt_experiments.data.missing import MissingData
from blockadapt_experiments.data.sprites import FACTORS, SIZES, grid, load_sprites, render, spread

SQUARE, ELLIPSE, HEART = range(3)
SMALL = (3, 2, 4, 3, 5)


# Drawn --------------------------------------------------------------------------------------------------------------


def outline(shape: int) -> np.ndarray:
    """Corners of the shape at scale 1 about its centre, X to the right and Y upwards, [corners, 2]."""
    t = np.linspace(0, 2 * np.pi, 20_001)[:-1]
    if shape == SQUARE:
        return 9.6 * np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]])
    if shape == ELLIPSE:
        return np.stack([12.8 * np.cos(t), 7.2 * np.sin(t)], axis=1)
    X = 16 * np.sin(t) ** 3
    Y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([19.2 * (C - (C.max() + C.min()) / 2) / (C.max() - C.min()) for C in (X, Y)], axis=1)


@pytest.mark.parametrize("shape", [SQUARE, ELLIPSE, HEART])
def test_a_pixel_is_on_where_its_centre_is_inside_the_outline(shape: int) -> None:
    centres = np.stack(np.meshgrid(np.arange(64) + 0.5, np.arange(64) + 0.5), axis=-1).reshape(-1, 2)
    for scale, orientation, x, y in [(5, 0, 0, 31), (0, 7, 13, 2), (3, 22, 31, 0), (5, 35, 17, 9)]:
        s, θ = np.linspace(0.5, 1, 6)[scale], np.linspace(0, 2 * np.pi, 40)[orientation]
        left, top = 16 + 32 * np.linspace(0, 1, 32)[[x, y]]
        turned = s * outline(shape) @ np.array([[np.cos(θ), np.sin(θ)], [-np.sin(θ), np.cos(θ)]])
        corners = np.array([left, top]) + turned * [1, -1]  # lines run downwards
        (image,) = render(np.array([[shape, scale, orientation, x, y]]))
        np.testing.assert_array_equal(image, MplPath(corners).contains_points(centres).reshape(64, 64))


@pytest.mark.parametrize("shape", [SQUARE, ELLIPSE, HEART])
def test_areas_are_those_of_the_shapes(shape: int) -> None:
    height = sprites.HEART_TOP - sprites.HEART_BOTTOM
    full = [19.2**2, math.pi * 12.8 * 7.2, 180 * math.pi * (19.2 / 32) * (19.2 / height)][shape]
    for scale in range(6):
        classes = np.array([[shape, scale, 17, x, y] for x in range(32) for y in range(32)])
        areas = render(classes).sum(axis=(1, 2))
        assert areas.mean() == pytest.approx(full * (0.5 + 0.1 * scale) ** 2, rel=2e-3)


def test_nothing_leaves_the_frame_or_the_window_it_is_drawn_in(monkeypatch: pytest.MonkeyPatch) -> None:
    corners = [[shape, 5, angle, x, y] for shape in range(3) for angle in range(40) for x in (0, 31) for y in (0, 31)]
    fractions = [[shape, 5, 5, x, 0] for shape in range(3) for x in range(32)]
    classes = np.array(corners + fractions)
    images = render(classes)
    assert not images[:, [0, -1]].any()
    assert not images[:, :, [0, -1]].any()
    monkeypatch.setattr(sprites, "REACH", 15)
    np.testing.assert_array_equal(render(classes), images)
    assert all(label(image, np.ones((3, 3)))[1] == 1 for image in images)  # in one piece


def test_the_last_angle_is_the_first_and_scale_one_is_the_largest() -> None:
    first, last = (render(np.array([[shape, 4, angle, 9, 20] for shape in range(3)])) for angle in (0, 39))
    np.testing.assert_array_equal(first, last)
    heart = render(np.array([[HEART, 5, 0, 0, 0]]))[0]
    assert heart[:16].sum() > 1.5 * heart[16:].sum()  # the tip is below
    top = np.flatnonzero(heart.any(axis=1))[0]
    assert not heart[top, 15:17].any()  # between two bumps
    quarter = render(np.array([[ELLIPSE, 5, 5, 16, 16]]))[0]  # 46° counterclockwise: from lower left to upper right
    assert quarter[24:40, 24:40].sum() > 0
    assert quarter[:32, 32:].sum() > 2 * quarter[:32, :32].sum()


def test_x_goes_right_and_y_down() -> None:
    places = [
        (line.mean(), column.mean())
        for line, column in map(np.nonzero, render(np.array([[0, 0, 0, 0, 0], [0, 0, 0, 31, 0], [0, 0, 0, 0, 31]])))
    ]
    np.testing.assert_allclose(np.array(places) + 0.5, [[16, 16], [16, 48], [48, 16]], atol=0.51)


# The grid -----------------------------------------------------------------------------------------------------------


def test_the_full_grid_is_that_of_dsprites() -> None:
    assert math.prod(SIZES) == 737_280
    assert FACTORS == ("shape", "scale", "orientation", "x", "y")
    rows = [0, 1, 32, 1024, 40960, 245760, 737279]
    expected = [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert grid(SIZES)[rows].tolist() == [*expected, [2, 5, 39, 31, 31]]


@pytest.mark.parametrize(
    ("factor", "size", "kept", "chosen"),
    [
        ("scale", 6, 6, [0, 1, 2, 3, 4, 5]),
        ("scale", 6, 2, [0, 5]),
        ("x", 32, 4, [0, 10, 21, 31]),
        ("y", 32, 1, [0]),
        ("orientation", 40, 4, [0, 10, 20, 30]),
        ("orientation", 40, 40, list(range(40))),
    ],
)
def test_values_are_kept_evenly_spread(factor: str, size: int, kept: int, chosen: list[int]) -> None:
    assert spread(factor, size, kept).tolist() == chosen


def test_loaded_images_are_the_drawn_ones_in_the_order_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sprites, "CHUNK", 7)
    sprites._loaded.cache_clear()
    drawn = load_sprites("dsprites-like", SMALL)
    assert (drawn.name, len(drawn), drawn.packed.shape) == ("dSprites-like", 360, (360, 512))
    np.testing.assert_array_equal(drawn.classes, grid(SMALL))
    values = [np.array(each) for each in ([0, 1, 2], [0, 5], [0, 10, 20, 30], [0, 16, 31], [0, 8, 16, 23, 31])]
    rows = [0, 359, 17, 200]
    expected = render(np.array([[v[c] for v, c in zip(values, grid(SMALL)[row], strict=True)] for row in rows]))
    images = drawn.images(torch.tensor(rows))
    assert (images.dtype, images.shape) == (torch.float32, (4, 1, 64, 64))
    np.testing.assert_array_equal(images.squeeze(1).numpy(), expected.astype(np.float32))
    sprites._loaded.cache_clear()


# Read ---------------------------------------------------------------------------------------------------------------


def write_file(path: Path, sizes: tuple[int, ...] = SMALL, **changes: np.ndarray) -> np.ndarray:
    """A file like the published one, rows in random order; returns its images in the order of the grid."""
    random = np.random.default_rng(0)
    images = (random.random((math.prod(sizes), 64, 64)) < 0.1).astype(np.uint8)
    order = random.permutation(len(images))
    classes = np.concatenate([np.zeros((len(order), 1), np.int64), grid(sizes)[order]], axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{"imgs": images[order], "latents_classes": classes, **changes})  # type: ignore[arg-type]
    return images


@pytest.mark.parametrize("folder", ["", "dsprites"])
def test_the_published_file_is_read_chunk_by_chunk_into_the_order_of_the_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setattr(sprites, "CHUNK", 50)
    images = write_file(tmp_path / folder / "dsprites_ndarray_64x64.npz")
    whole = load_sprites("dsprites", SMALL, tmp_path)
    assert whole.name == "dSprites"
    np.testing.assert_array_equal(whole.images(torch.arange(360)).squeeze(1).numpy(), images)
    part = load_sprites("dsprites", (3, 1, 2, 2, 2), tmp_path)
    kept = images.reshape(*SMALL, 64, 64)[:, :1][:, :, [0, 2]][:, :, :, [0, 2]][:, :, :, :, [0, 4]]
    np.testing.assert_array_equal(part.images(torch.arange(24)).squeeze(1).numpy(), kept.reshape(24, 64, 64))


def test_missing_and_double_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MissingData, match=r"^data: dSprites was not found because no folder was given; put its .*dir DI"
    ):
        load_sprites("dsprites", SMALL)
    with pytest.raises(MissingData, match=r'not found in .*--set data="dsprites-like"'):
        load_sprites("dsprites", SMALL, tmp_path)
    for name in ("dsprites_a.npz", "dsprites_b.npz"):
        write_file(tmp_path / name, (1, 1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"^data: `data-dir` must be a folder with one dsprites\*.npz, got"):
        load_sprites("dsprites", SMALL, tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"latents_classes": grid(SMALL)[:-1]}, "must be a file with each combination of factors once"),
        ({"imgs": np.zeros((360, 32, 32), np.uint8)}, r"must be uint8 of shape \(360, 64, 64\)"),
        ({"imgs": np.zeros((360, 64, 64), np.float16)}, "must be uint8"),
        ({"imgs": np.asfortranarray(np.zeros((360, 64, 64), np.uint8))}, "`imgs` must be stored by rows"),
    ],
)
def test_a_file_that_is_no_grid_of_images_is_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], sentence: str
) -> None:
    write_file(tmp_path / "dsprites.npz", **changes)
    with pytest.raises(ValueError, match=sentence):
        load_sprites("dsprites", SMALL, tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dsprites.npz"
    write_file(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cannot be read as dSprites"):
        load_sprites("dsprites", SMALL, tmp_path)
    np.savez(path, images=np.zeros(3))
    with pytest.raises(ValueError, match="latents_classes"):
        load_sprites("dsprites", SMALL, tmp_path)
    header, classes = io.BytesIO(), io.BytesIO()
    npy.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (360, 64, 64)})
    npy.write_array(classes, grid(SMALL))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("imgs.npy", header.getvalue() + bytes(5000))
        archive.writestr("latents_classes.npy", classes.getvalue())
    with pytest.raises(ValueError, match="its images end early"):
        load_sprites("dsprites", SMALL, tmp_path)


def test_more_values_than_there_are_and_other_names_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "dsprites.npz")
    with pytest.raises(ValueError, match=r"^data: `values of scale` must be in \[1, 2\], got 3.$"):
        load_sprites("dsprites", (3, 3, 4, 3, 5), tmp_path)
    with pytest.raises(ValueError, match=r"^data: `data` must be one of 'dsprites-like', 'dsprites', got 'faces'.$"):
        load_sprites("faces", SMALL)
