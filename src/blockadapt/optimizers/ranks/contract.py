"""Says what a step asks of the processes that train together, and how they vote on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from blockadapt.errors import NonFiniteGradientError
from blockadapt.optimizers.ranks.messages import last_vote, note_vote
from blockadapt.optimizers.unit import Unit
from blockadapt.validation import Described, refusal


class Verdict(IntEnum):
    """Says what a process has to say of a step. The gravest verdict counts for all."""

    GO = 0
    SKIP = 1
    NOT_FINITE = 2
    FAILED = 3


class Ranks(Protocol):
    """Tells what a step needs to know of the processes that train together."""

    def share_out(self, units: Sequence[Unit], before: Sequence[Unit]) -> None:
        """Say of units what of them lies here. `before` are all units as they were shared out last."""
        ...

    def warn(self) -> None:
        """Say once where blocks are not cut as in one process."""
        ...

    def buckets(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """Return these units in the order in which they are moved and published; `Unit.local` is up to date then."""
        ...

    def agree(self, verdict: Verdict) -> Verdict:
        """Return whether all go on or all skip, or raise if another process cannot go on. Nothing is written before."""
        ...

    def publish(self, bucket: int) -> None:
        """Begin to give the others what was moved here."""
        ...

    def finish_(self) -> None:
        """Take what the others moved. This is the last thing in a step."""
        ...

    def require_whole(self) -> None:
        """Raise if the state here is no longer that of any step of all."""
        ...


def agreed(owner: str, verdict: Verdict, groups: Mapping[Any, torch.device], moved: int = 0) -> Verdict:
    """Return the gravest verdict of all processes.

    They also agree on a number for the vote, the greatest that one of them would give it: a process that an interrupt
    has thrown out of a vote takes part in the next one, and has missed a number.

    Args:
        owner: Who asks, for messages.
        verdict: That of this process.
        groups: The process groups to ask, one after another, and the device that each one's messages lie on.
        moved: A number that must be the same in all processes that go on: it stands for what they move.

    Raises:
        NonFiniteGradientError: Another process has a gradient that is not finite.
        RuntimeError: Another process failed, or does not answer.
        ValueError: Processes have gradients for different parameters, or other ideas of who moves what of them.
    """
    try:
        said = [verdict, moved, -moved, 0]
        for group, device in groups.items():
            said[3] = max(said[3], last_vote(group) + 1)
            vote = torch.tensor(said, device=device)
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=group)
            said = vote.tolist()
            note_vote(group, said[3])
    except Exception as error:
        raise RuntimeError(f"{owner}: another process does not answer; parameters and state are unchanged.") from error
    gravest, most, least, _ = said
    if verdict <= Verdict.SKIP < gravest:
        if gravest == Verdict.NOT_FINITE:
            raise NonFiniteGradientError(
                f"{owner}: another process has a gradient that is not finite; parameters and state are unchanged."
            )
        raise RuntimeError(f"{owner}: another process failed in this step; parameters and state are unchanged.")
    if gravest == Verdict.GO and most != -least:
        rule = "there for the same parameters in every process, of the same dtype and shape, cut and shared out alike"
        raise ValueError(refusal(owner, "grad", rule, Described("other ones")))
    return Verdict(gravest)
