"""Writes rows of a run as TensorBoard reads them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from blockadapt_experiments.results.measurements import Row


class Board:
    """Writes the log of one run. It is written anew whenever the run is continued, from the rows that hold.

    Args:
        folder: Where it goes.
        axis: The column that the others are drawn over.
        rows: What was measured before.
    """

    def __init__(self, folder: Path, axis: str, rows: Sequence[Row]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # most of a second, which only those pay who want it

        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        self._axis = axis
        self._count = 0
        self.add(rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Log these rows. TensorBoard counts in whole numbers: where the axis does not, rows are counted instead."""
        for row in rows:
            place = row[self._axis]
            counted = not isinstance(place, int)
            for name in row:
                if name != self._axis or counted:
                    self._writer.add_scalar(name, row[name], self._count if counted else place)
            self._count += 1
        self._writer.flush()

    def close(self) -> None:
        """Close the log: nothing more will come."""
        self._writer.close()
