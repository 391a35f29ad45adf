"""Measures α* as param groups train: one estimate for each group whose clip is "auto".

A step counts pᵀm̂ and m̂ᵀm̂ in tallies, one for each group and each set of processes that parameters are shared out over.
The next step begins with adding up each tally, because nothing may be raised after a write. What several processes have
counted travels in the meantime. The numbers are read when someone wants to know them: so a GPU is waited for when a
step looks at its gradients, and not a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from blockadapt.kernels import Tally
from blockadapt.optimizers.ranks import Sum
from blockadapt.optimizers.unit import Group, Unit
from blockadapt.spectrum import Estimate, SpectrumClip
from blockadapt.validation import has_numbers

Pair = tuple[float, float] | Tensor
"""pᵀm̂ and m̂ᵀm̂."""


class Estimates:
    """Measures α* for an optimizer. The estimates themselves are in its param groups, where checkpoints find them.

    Args:
        owner: Who asks, for messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tallies: dict[tuple[int, Any], Tally] = {}
        self._counted: dict[tuple[int, Any], Tally] = {}
        self._sums: list[tuple[list[int], Sum]] = []  # of which groups, in the step that is being taken
        self._unread: list[tuple[Group, float, list[Any]]] = []  # what tells a pair; the pair itself once it is told

    def begin(self) -> None:
        """Begin a step: nothing is counted yet, and all that earlier steps counted is read."""
        self.read()
        self._counted.clear()
        self._sums.clear()

    def tally(self, unit: Unit) -> Tally | None:
        """Give the tally in which this unit's blocks count in this step; None if nobody measures them."""
        if not self._measures(unit.group) or not has_numbers(unit.local(unit.owner)):
            return None
        key = unit.index, unit.processes
        if key not in self._counted:
            tally = self._tallies.get(key)
            if tally is None:
                device = unit.local(unit.owner).device
                there = device if device.type != "mps" else torch.device("cpu")  # Apple's GPUs have no float64
                tally = self._tallies[key] = Tally(there)
            tally.clear()
            self._counted[key] = tally
        return self._counted[key]

    def _measures(self, group: Group) -> bool:
        """Tell whether this group measures α* in this step. It stops when the interval has closed on what is known."""
        clip: SpectrumClip | None = group["clip"]
        if clip is None or clip.final_lr != "auto" or not float(group["lr"]) > 0:
            return False
        steps = Estimate.of(self._owner, group["estimate"]).steps
        return not steps or not clip.is_closed(steps + 1)

    def make_ready(self) -> None:
        """Make what brings together the counts of several processes. Nothing is made after the vote.

        Each process has come to the groups in an order of its own, and what they tell each other bears no names.
        """
        counted = sorted(self._counted, key=itemgetter(0))
        for processes in dict.fromkeys(processes for _, processes in counted if processes is not None):
            indices = [index for index, others in counted if others is processes]
            parts = [self._counted[index, processes].total for index in indices]
            self._sums.append((indices, Sum(self._owner, parts, processes)))

    def expect(self) -> None:
        """Begin to take other processes' counts: all have agreed on the step, and nothing is written."""
        for _, counts in self._sums:
            counts.expect()

    def note(self, groups: Sequence[Group]) -> None:
        """Note what the step that was just written has counted, and begin to tell other processes."""
        noted: dict[int, list[Any]] = {}
        for (index, processes), tally in self._counted.items():
            if processes is None:
                noted.setdefault(index, []).append(tally.pair)
        for indices, counts in self._sums:
            counts.send()
            for position, index in enumerate(indices):
                noted.setdefault(index, []).append(partial(counts.total, position))
        self._unread += [(groups[index], float(groups[index]["lr"]), parts) for index, parts in noted.items()]

    def add_up(self) -> None:
        """Add up what was noted, without waiting for a device.

        Raises:
            RuntimeError: Another process does not answer.
        """
        for _, _, parts in self._unread:
            parts[:] = [reduce(_added, (part() if callable(part) else part for part in parts))]

    def read(self) -> None:
        """Take what was noted into the groups' estimates."""
        self.add_up()
        while self._unread:
            group, lr, (pair,) = self._unread[0]
            along, square = pair.tolist() if isinstance(pair, Tensor) else pair
            group["estimate"] = tuple(Estimate.of(self._owner, group["estimate"]).with_step(along, square, lr))
            del self._unread[0]


def _added(*pairs: Pair) -> Tensor:
    """Add up two pairs, of which one has come from other processes."""
    first, second = (torch.as_tensor(pair, dtype=torch.float64) for pair in pairs)
    return first + second
