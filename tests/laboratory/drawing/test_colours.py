"""Curves can be told apart, by everyone, on white."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import blockadapt_experiments.report as report
from blockadapt_experiments.contenders.catalogue import CONTENDERS
from blockadapt_experiments.drawing.colours import COLOURS, STYLES, Style, styles_of

# Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as each kind of colour-blindness sees it.
VISION = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    """The colour in linear RGB."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB, where a distance of 2 to 3 is just seen."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def test_every_contender_has_a_style_of_its_own() -> None:
    assert STYLES.keys() == CONTENDERS.keys()
    assert len(set(STYLES.values())) == len(STYLES)


def test_an_optimizer_looks_the_same_wherever_it_stands_and_28_other_arms_look_different() -> None:
    others = [f"arm {number}" for number in range(28)]
    seen = []
    for place in (0, 5, 28):
        styles = styles_of({arm: arm for arm in [*others[:place], "block-adam", *others[place:]]})
        assert styles["block-adam"] == STYLES["block-adam"]
        assert len({*styles.values()}) == len(styles) == 29
        seen.append({arm: styles[arm] for arm in others})
    assert seen[0] == seen[1] == seen[2]


def test_an_arm_has_the_colour_of_its_optimizer_and_a_dash_of_its_own() -> None:
    styles = styles_of({"b25": "block-adam", "adam": "adam", "block-adam": "block-adam", "b9": "block-adam"})
    assert styles["block-adam"] == STYLES["block-adam"]
    assert {styles[arm].colour for arm in ("b25", "b9")} == {STYLES["block-adam"].colour}
    assert len({*styles.values()}) == 4


@pytest.mark.parametrize(("arm", "optimizer"), [("b25", "block-adam"), ("mine", "mine"), ("adam@there", "adam")])
def test_an_arm_looks_the_same_whichever_optimizers_stand_beside_it(arm: str, optimizer: str) -> None:
    (alone,) = styles_of({arm: optimizer}).values()
    every = {name: name for name in CONTENDERS}
    for others in ({}, every, {"loose": "adam"}):
        assert styles_of({**others, arm: optimizer})[arm] == styles_of({arm: optimizer, **others})[arm] == alone
    assert alone not in STYLES.values()


def test_of_two_arms_that_would_look_alike_the_first_by_name_keeps_its_look() -> None:
    alone = {arm: styles_of({arm: "block-adam"})[arm] for arm in (f"b{size}" for size in range(10, 20))}
    first, second = next(pair for pair in combinations(sorted(alone), 2) if alone[pair[0]] == alone[pair[1]])
    for names in ((first, second), (second, first)):
        styles = styles_of(dict.fromkeys(names, "block-adam"))
        assert styles[first] == alone[first]
        assert styles[second] != alone[second]


def test_a_name_means_the_same_style_in_every_process() -> None:
    assert styles_of({"mine": "mine", "b25": "block-adam"}) == {"mine": Style(2, 7), "b25": Style(0, 6)}


@pytest.mark.parametrize("vision", VISION)
def test_the_colours_are_far_apart_in_every_eye(vision: str) -> None:
    seen = [lab(np.asarray(VISION[vision]) @ linear(colour)) for colour in COLOURS]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 16


@pytest.mark.parametrize("colour", COLOURS)
def test_a_line_stands_out_from_white(colour: str) -> None:
    luminance = linear(colour) @ [0.2126, 0.7152, 0.0722]
    assert 1.05 / (luminance + 0.05) > 3  # what WCAG 2.1 asks of graphics


def test_the_report_has_the_same_colours() -> None:
    css = (Path(report.__file__).parent / "assets" / "page.css").read_text(encoding="utf-8")
    for number, colour in enumerate(COLOURS):
        assert f"--c{number}: {colour.lower()};" in css
