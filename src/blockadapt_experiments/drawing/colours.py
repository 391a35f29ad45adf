"""Gives one colour and one dash for each optimizer, in every plot, page and demo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

# Blue, vermilion, green and black are Okabe and Ito's. Their yellow, orange and sky blue are too light for a line on
# white (contrast below 3), so pink is a little darker here, and violet and brown stand in for the others. A test says
# that the colour-blind can tell all seven apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC6FA4", "#7A08D0", "#6A2A00", "#000000")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (1.5, 1.5)),
    (0, (7, 2, 1.5, 2)),
    # for arms and for what is not built in
    (0, (8, 2.5, 3, 2.5)),
    (0, (3, 3)),
    (0, (1.5, 4)),
    (0, (7, 2, 1.5, 2, 1.5, 2)),
)

_BLUE, _VERMILION, _GREEN, _PINK, _VIOLET, _BROWN, _BLACK = range(len(COLOURS))
_SOLID, _DASHED, _DOTTED, _DASH_DOTTED, *_OTHERS = range(len(DASHES))


class Style(NamedTuple):
    """Says how a curve looks: positions in `COLOURS` and `DASHES`, which a page has in its own forms."""

    colour: int
    dash: int

    def line(self) -> dict[str, Any]:
        """Return Matplotlib's arguments for it."""
        return {"color": COLOURS[self.colour], "linestyle": DASHES[self.dash]}

    def strokes(self) -> list[float]:
        """Return the lengths of its dashes and gaps, in widths of the line; none if it is solid."""
        return [] if DASHES[self.dash] == "-" else list(DASHES[self.dash][1])


STYLES: dict[str, Style] = {
    "sgd": Style(_BLACK, _SOLID),
    "full-adagrad": Style(_BLACK, _DASHED),
    "block-adam-auto-clip": Style(_BLACK, _DOTTED),
    "adam": Style(_VERMILION, _SOLID),
    "adamw": Style(_VERMILION, _DASHED),
    "adabound": Style(_VERMILION, _DOTTED),
    "amsgrad": Style(_VERMILION, _DASH_DOTTED),
    "block-adam": Style(_BLUE, _SOLID),
    "block-adamw": Style(_BLUE, _DASHED),
    "block-adam-clip": Style(_BLUE, _DOTTED),
    "block-amsgrad": Style(_BLUE, _DASH_DOTTED),
    "paper-adam": Style(_BROWN, _SOLID),
    "nadam": Style(_BROWN, _DASHED),
    "amsbound": Style(_BROWN, _DOTTED),
    "yogi": Style(_BROWN, _DASH_DOTTED),
    "block-rmsprop": Style(_GREEN, _SOLID),
    "block-adagrad": Style(_GREEN, _DASHED),
    "block-rmsprop-clip": Style(_GREEN, _DOTTED),
    "block-adafom": Style(_GREEN, _DASH_DOTTED),
    "rmsprop": Style(_PINK, _SOLID),
    "adagrad": Style(_PINK, _DASHED),
    "adadelta": Style(_PINK, _DOTTED),
    "soap": Style(_VIOLET, _SOLID),
    "muon": Style(_VIOLET, _DASHED),
    "shampoo": Style(_VIOLET, _DOTTED),
    "ggt": Style(_VIOLET, _DASH_DOTTED),
}
"""By the contender's name. Adam's family is vermilion and its blocks are blue; each has the dash of its counterpart,
and what is clipped is dotted.
"""


PAIRS: dict[str, Style] = {"same-layer": Style(_BLUE, _SOLID), "different-layers": Style(_VERMILION, _DASHED)}
"""What `toy-landscape` compares, which are no optimizers and stand in no picture with one."""


def bar_colours(optimizers: Mapping[str, str], label: Callable[[str], str]) -> dict[str, str]:
    """Return the colour of each arm by its label, for bars."""
    return {label(arm): COLOURS[style.colour] for arm, style in styles_of(optimizers).items()}


def styles_of(optimizers: Mapping[str, str]) -> dict[str, Style]:
    """Return the style of each arm, from which optimizer it is.

    An optimizer under its own name has its own style. Any other arm has one that no optimizer has, in the colour of its
    optimizer if that has one. Which one, its name says; so it looks the same in every report, whoever else is there. Of
    two that would look alike the later by name has the next style that is free. So 28 such arms look different.
    """
    known = {**STYLES, **PAIRS}
    found = {arm: known[arm] for arm in optimizers if arm in known}
    every = [Style(colour, dash) for colour in range(len(COLOURS)) for dash in _OTHERS]
    for arm in sorted(optimizers.keys() - found.keys()):
        kin = STYLES.get(optimizers[arm])
        first = [style for style in every if kin and style.colour == kin.colour]
        wanted = [*_from(first, arm), *_from(every, arm)]
        found[arm] = next((style for style in wanted if style not in found.values()), wanted[0])
    return {arm: found[arm] for arm in optimizers}


def _from(styles: Sequence[Style], name: str) -> list[Style]:
    """Turn a ring of styles to where this name begins, the same in every process."""
    place = crc32(name.encode()) % len(styles) if styles else 0
    return [*styles[place:], *styles[:place]]
