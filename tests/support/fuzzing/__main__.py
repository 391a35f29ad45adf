"""The child process that guard pages need: `python -m support.fuzzing numba 3 1000 log`."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

from support.fuzzing import Training, fuzz
from support.guards import Pages

if __name__ == "__main__":
    faulthandler.enable()
    kernel, number, sequences, record = sys.argv[1:]
    with Path(record).open("w") as Training.log:
        fuzz(kernel, int(sequences), Pages, start=int(number))
    print("deviations by tolerance:", Training.deviations)
