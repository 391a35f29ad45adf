"""Records Term A, Term B and the spectrum of every parameter while an optimizer trains."""

from __future__ import annotations

import csv
import importlib
import math
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch

from blockadapt.diagnostics.figures import JOINS, Before, Figures, joined, measure
from blockadapt.diagnostics.operators import block_state, final_lrs, latest_coefficients, units_with_coordinates
from blockadapt.optimizers import BlockOptimizer
from blockadapt.optimizers.autocast import without_autocast
from blockadapt.spectrum import Spectrum
from blockadapt.validation import Described, require, require_integer

TOTAL = "total"
FIGURES = (*(name for name in JOINS if name not in ("along", "square", "step_norm")), "measured_lr", "step_norm")
COLUMNS = ("step", "parameter", *FIGURES)

Row = dict[str, Any]


class ScalarWriter(Protocol):
    """Says what is needed of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Log one value."""


class SpectrumRecorder:
    """Record what an optimizer of this library applies: Pₜ = U diag(s(Λ)) Uᵀ, block by block.

    At every step t that `every` divides, one row for each parameter that moved and one for their `"total"`. Step size,
    bias correction and clipping are inside P; gₜ is the gradient as the moments take it, coupled weight decay included.

        term_a               ‖Pₜ gₜ‖²
        term_b_spectral      max over blocks ‖Pₜ − Pₜ₋₁‖₂; NaN at a parameter's first step, which has no P₀
        term_b_nuclear       Σ over blocks ‖Pₜ − Pₜ₋₁‖_*; with blocks of one coordinate Σ |pₜ − pₜ₋₁|
        smallest_eigenvalue  of V̂
        largest_eigenvalue   of V̂
        condition            max over blocks κ(√β₂ V̂^{1/2} + δ I); for AdaGrad and AdaFom 1 − 1/t for β₂
        rank                 eigenvalues of V̂ above n ε times their block's largest, ε that of the statistics' dtype
        coordinates          how many there are
        clipped_low          fraction of the spectrum s that the clip holds at its lower bound
        clipped_high         fraction of the spectrum s that the clip holds at its upper bound
        final_lr             α*, around which the clip's interval lay; NaN without one, and where groups differ
        measured_lr          pᵀm̂ / m̂ᵀm̂, p being the step before any clip: what an `"auto"` clip averages
        step_norm            ‖xₜ − xₜ₋₁‖

    Once the clip has closed, P is α* I: V̂ is gone, its figures are NaN, and both fractions are 1. Everything is
    computed in float64 from the state that the optimizer keeps, and changes nothing in it. A step that is skipped
    because of a non-finite gradient has no row and is not counted.

    Args:
        optimizer: Any optimizer of this library. The recorder is attached at once, and until `detach`.
        every: Record steps that this divides.
        writer: A `torch.utils.tensorboard.SummaryWriter` that also gets every row as it is recorded.

    Attributes:
        history: The rows, as plain dicts.

    Example:
        >>> model = torch.nn.Linear(20, 10)
        >>> optimizer = BlockAdam(model.named_parameters())
        >>> with SpectrumRecorder(optimizer, every=2) as recorder:
        ...     for _ in range(4):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(8, 20)).square().mean().backward()
        ...         optimizer.step()
        >>> [(row["step"], row["parameter"], row["coordinates"]) for row in recorder.history]
        [(2, 'weight', 200), (2, 'bias', 10), (2, 'total', 210), (4, 'weight', 200), (4, 'bias', 10), (4, 'total', 210)]
    """

    def __init__(self, optimizer: BlockOptimizer, every: int = 10, writer: ScalarWriter | None = None) -> None:
        owner = type(self).__name__
        kind = Described(type(optimizer).__name__)
        require(isinstance(optimizer, BlockOptimizer), owner, "optimizer", "an optimizer of blockadapt", kind)
        require_integer(owner, "every", every, least=1)
        _require_writer(owner, writer, optional=True)
        self.optimizer = optimizer
        self.every = every
        self.history: list[Row] = []
        self._writer = writer
        self._step: int | None = None  # steps taken; read from the optimizer's state when the first one comes
        self._skipped = 0
        self._before: dict[str, Before] | None = None
        self._final_lrs: list[float | None] = []  # α* of each group in the step under way: the step measures it anew
        self._spectra: dict[str, Spectrum] = {}  # of the step before a recorded one: a schedule may change lr between
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Stop recording; the history stays."""
        for handle in self._handles:
            handle.remove()
        self._before = None

    def __enter__(self) -> SpectrumRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    # Recording -----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._step is None:
            self._step = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        self._skipped = optimizer.skipped_steps
        self._final_lrs = final_lrs(optimizer)
        self._before = self._snapshot() if (self._step + 1) % self.every == 0 else None

    def _snapshot(self) -> dict[str, Before]:
        """Copy all that the step will overwrite."""
        before = {}
        for unit in units_with_coordinates(self.optimizer):
            spectrum = self._spectra.get(unit.key)
            if spectrum is None and (coefficients := latest_coefficients(self.optimizer, unit)):
                spectrum = coefficients.spectrum
            state = {name: tensor.clone() for name, tensor in block_state(self.optimizer, unit).items()}
            before[unit.key] = Before([param.detach().clone() for param in unit.params], state, spectrum)
        return before

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before, self._before = self._before, None
        if self._step is None or optimizer.skipped_steps != self._skipped or not self._has_gradients():
            return  # attached within a step, or nothing moved
        self._step += 1
        if before is not None:
            with without_autocast():
                self._record(before)
        if (self._step + 1) % self.every == 0:
            self._spectra = {
                unit.key: coefficients.spectrum
                for unit in units_with_coordinates(optimizer)
                if (coefficients := latest_coefficients(optimizer, unit, self._final_lrs))
            }

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for group in self.optimizer.param_groups for param in group["params"])

    @torch.no_grad()
    def _record(self, before: Mapping[str, Before]) -> None:
        moved = [unit for unit in units_with_coordinates(self.optimizer) if unit.is_moved()]
        if moved:
            figures = [measure(self.optimizer, unit, before[unit.key], self._final_lrs) for unit in moved]
            names = [unit.name if unit.name != TOTAL else unit.key for unit in moved]
            rows = [self._row(*pair) for pair in zip([*names, TOTAL], [*figures, joined(figures)], strict=True)]
            self.history += rows
            if self._writer is not None:
                _log(self._writer, rows)

    def _row(self, parameter: str, figures: Figures) -> Row:
        row = {"step": self._step, "parameter": parameter, **dict.fromkeys(FIGURES, math.nan)}
        row |= {name: value for name, value in figures.items() if name in row}
        for name in ("clipped_low", "clipped_high"):
            row[name] = figures[name] / figures["coordinates"]
        if figures["square"] > 0:
            row["measured_lr"] = figures["along"] / figures["square"]
        return row

    # What was recorded ---------------------------------------------------------------------------------------------

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the history as a CSV file, floats in full precision."""
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.history)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the history as a Parquet file.

        Raises:
            ModuleNotFoundError: pyarrow is not installed.
        """
        try:
            pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{type(self).__name__}.to_parquet: pyarrow must be installed, e.g. with `pip install pyarrow`."
            ) from error
        kinds = {"step": pyarrow.int64(), "parameter": pyarrow.string(), "coordinates": pyarrow.int64()}
        schema = pyarrow.schema([(name, kinds.get(name, pyarrow.float64())) for name in COLUMNS])
        parquet.write_table(pyarrow.Table.from_pylist(self.history, schema), os.fspath(path))

    def to_tensorboard(self, writer: ScalarWriter) -> None:
        """Log the history so far: one scalar `column/parameter` for each number that is not NaN.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`.
        """
        _require_writer(f"{type(self).__name__}.to_tensorboard", writer)
        _log(writer, self.history)

    def state_dict(self) -> dict[str, Any]:
        """Return history and position as plain data, to be saved with the optimizer's state."""
        return {
            "step": self._step,
            "history": [dict(row) for row in self.history],
            "spectra": {key: list(spectrum) for key, spectrum in self._spectra.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a recorder left off, when the optimizer is loaded too.

        Args:
            state_dict: What `state_dict` gave.

        Raises:
            ValueError: It is not a recorder's state; nothing is changed.
        """
        known = isinstance(state_dict, Mapping) and {*state_dict} == {"step", "history", "spectra"}
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
        owner, rule = f"{type(self).__name__}.load_state_dict", "a recorder's, with 'history', 'spectra' and 'step'"
        require(known, owner, "state_dict", rule, found)
        self._step = state_dict["step"]
        self.history = [dict(row) for row in state_dict["history"]]
        self._spectra = {key: Spectrum(*spectrum) for key, spectrum in state_dict["spectra"].items()}


def _require_writer(owner: str, writer: Any, optional: bool = False) -> None:
    ok = callable(getattr(writer, "add_scalar", None)) or (optional and writer is None)
    require(ok, owner, "writer", "a SummaryWriter" + " or None" * optional, writer)


def _log(writer: ScalarWriter, rows: Sequence[Row]) -> None:
    for row in rows:
        for name in FIGURES:
            if not math.isnan(row[name]):
                writer.add_scalar(f"{name}/{row['parameter']}", row[name], row["step"])
