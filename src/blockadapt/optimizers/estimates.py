"""α* as param groups measure it: one estimate for each group whose clip is "auto".

A step counts pᵀm̂ and m̂ᵀm̂ in tallies, one for each group and each set of processes that parameters are shared out over.
The next step begins with adding up each tally, because nothing that needs memory may follow a write. Only what several
processes have counted is added up at once. The numbers are read when someone wants to know them: so a GPU is waited for
when a step looks at its gradients, and not a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from blockadapt.kernels import Tally
from blockadapt.optimizers.ranks import added_up
from blockadapt.optimizers.unit import Group, Unit
from blockadapt.spectrum import Estimate, SpectrumClip
from blockadapt.validation import has_numbers


class Estimates:
    """Measures α* for an optimizer. The estimates themselves are in its param groups, where checkpoints find them.

    Args:
        owner: Who asks, for messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tallies: dict[tuple[int, Any], Tally] = {}
        self._counted: dict[tuple[int, Any], Tally] = {}
        self._unread: list[tuple[Group, float, list[Any]]] = []  # tallies and pairs; one pair once they are added up

    def begin(self) -> None:
        """Begin a step: nothing is counted yet, and all that earlier steps counted is read."""
        self.read()
        self._counted.clear()

    def tally(self, unit: Unit) -> Tally | None:
        """Give the tally in which this unit's blocks count in this step; None if nobody measures them."""
        if not self._measures(unit.group) or not has_numbers(unit.local(unit.owner)):
            return None
        key = unit.index, None if unit.share is None else unit.share.processes
        tally = self._counted.get(key)
        if tally is None:
            device = unit.local(unit.owner).device
            there = device if device.type != "mps" else torch.device("cpu")  # Apple's GPUs have no float64
            tally = self._tallies.setdefault(key, Tally(there))
            tally.clear()
            self._counted[key] = tally
        return tally

    def _measures(self, group: Group) -> bool:
        """Whether this group measures α* in this step. It stops when the interval has closed on what is known."""
        clip: SpectrumClip | None = group["clip"]
        if clip is None or clip.final_lr != "auto" or not float(group["lr"]) > 0:
            return False
        steps = Estimate.of(self._owner, group["estimate"]).steps
        return not steps or not clip.is_closed(steps + 1)

    def note(self, groups: Sequence[Group]) -> None:
        """Note what the step that was just written has counted; other processes' counts are fetched.

        Raises:
            RuntimeError: Another process does not answer.
        """
        noted: dict[int, list[Any]] = {}
        for processes in dict.fromkeys(processes for _, processes in self._counted):
            indices = [index for index, others in self._counted if others is processes]
            parts: Sequence[Any] = [self._counted[index, processes] for index in indices]
            if processes is not None:
                parts = added_up(self._owner, torch.stack([part.total() for part in parts]), processes).unbind()
            for index, part in zip(indices, parts, strict=True):
                noted.setdefault(index, []).append(part)
        self._unread += [(groups[index], float(groups[index]["lr"]), parts) for index, parts in noted.items()]

    def add_up(self) -> None:
        """Add up what was noted, without waiting for a device."""
        for _, _, parts in self._unread:
            parts[:] = [reduce(torch.add, (part.total() if isinstance(part, Tally) else part for part in parts))]

    def read(self) -> None:
        """Take what was noted into the groups' estimates."""
        self.add_up()
        while self._unread:
            group, lr, (pair,) = self._unread[0]
            along, square = pair.tolist()
            group["estimate"] = tuple(Estimate.of(self._owner, group["estimate"]).with_step(along, square, lr))
            del self._unread[0]
