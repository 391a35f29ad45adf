"""Brings what each process has to say to all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its new name, and the old one


_votes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_under_way: WeakKeyDictionary[Any, list[list[Any]]] = WeakKeyDictionary()


def last_vote(group: Any) -> int:
    """Tell the number of the last vote of a group that this process knows of."""
    return _votes.get(group, 0)


def note_vote(group: Any, number: int) -> None:
    """Note that all processes of a group have voted, and which number they gave the vote. Messages bear it."""
    _votes[group] = number


class Exchange:
    """Brings the rows of every rank to all others of a group, between two votes.

    Its messages bear the number of the last vote, and all ranks have agreed on that. So a step that was broken off
    leaves nothing that a later one takes for its own. Messages that nobody waits for any more are kept until the group
    ends: gloo writes into their memory.

    Args:
        group: The processes.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank, size = dist.get_rank(group), dist.get_world_size(group)
        ahead = [(self._rank + steps) % size for steps in range(1, size)]
        self._others = [(rank, dist.get_global_rank(group, rank)) for rank in ahead]
        self._coming: list[Any] = []
        self._going: list[Any] = []
        _under_way[group] = [*filter(None, _under_way.get(group, [])), self._coming, self._going]

    def expect(self, rows: Tensor) -> None:
        """Begin to take every other rank's row of `rows`, [ranks, length].

        A message that is expected goes its way at once: its sender writes it without asking first, and it arrives
        while the receiver does something else. Where rows do not go straight, `send` does all of it.
        """
        if go_straight(rows):
            for rank, name in reversed(self._others):
                self._coming.append(dist.irecv(rows[rank], name, self._group, last_vote(self._group)))

    def send(self, rows: Tensor) -> None:
        """Begin to give this rank's row of `rows` to all others, which expect it.

        Whoever is gone does not need it, and everybody hears of that: who waits for its rows now, all in the next vote.
        """
        here = rows[self._rank].view(-1)
        if not go_straight(rows):
            self._coming.append(_all_gather(rows.view(-1), here, group=self._group, async_op=True))
            return
        for _, name in self._others:
            with suppress(RuntimeError):
                self._going.append(dist.isend(here, name, self._group, last_vote(self._group)))

    def wait(self) -> None:
        """Wait until all rows have come, and until this rank's have gone to all who are still there."""
        while self._coming:
            self._coming[0].wait()
            del self._coming[0]
        while self._going:
            with suppress(RuntimeError):
                self._going[0].wait()
            del self._going[0]


def go_straight(rows: Tensor) -> bool:
    """Tell if rows go straight from rank to rank: gloo's all-gather takes twice as long for them in a CPU's memory."""
    return rows.is_cpu


class Sum:
    """Adds up what every process has, in their order, so that all of them get the same bits.

    It is made before the vote, with all memory that it needs; `expect` comes after the vote, and `send` when the
    numbers are known. Neither of them raises: a step may have been written, here or elsewhere. `total` does.

    Args:
        owner: Who asks, for messages.
        parts: What tells the numbers of this process, now and then alike in form.
        processes: Their group.
    """

    def __init__(self, owner: str, parts: Sequence[Callable[[], Tensor]], processes: Any) -> None:
        self._owner, self._parts = owner, parts
        self._exchange, self._rank = Exchange(processes), dist.get_rank(processes)
        here = torch.stack([part() for part in parts])
        self._rows = here.new_empty(dist.get_world_size(processes), *here.shape)
        self._failure: tuple[str, Exception] | None = None

    def expect(self) -> None:
        """Begin to take the numbers of all others."""
        try:
            self._exchange.expect(self._rows)
        except Exception as error:
            self._failure = _LOST, error

    def send(self) -> None:
        """Begin to tell the others what this process has."""
        try:
            self._rows[self._rank] = torch.stack([part() for part in self._parts])
        except Exception as error:
            self._failure = _UNTOLD, error
            return
        try:
            self._exchange.send(self._rows)
        except Exception as error:
            self._failure = _LOST, error

    def total(self, position: int) -> Tensor:
        """Wait for the others, and add up what all have of one of the parts.

        Raises:
            RuntimeError: Another process was lost, or this one could not tell what it has.
        """
        if self._failure is None:
            try:
                self._exchange.wait()
            except Exception as error:
                self._failure = _LOST, error
        if self._failure is not None:
            what, cause = self._failure
            raise RuntimeError(
                f"{self._owner}: {what}; parameters and state are those of that step. Load a checkpoint."
            ) from cause
        return self._rows[:, position].sum(0)


_LOST = "another process was lost before α* of the last step was known here"
_UNTOLD = "this process could not add up what the last step has shown of α*, nor tell the others"
