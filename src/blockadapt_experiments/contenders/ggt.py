"""Defines GGT: full-matrix adaptation of low rank, from a window of the last gradients (Agarwal et al., 2019).

The columns of G are kept unscaled, as the rows of a ring: `window` [r, d] for each parameter. What they are multiplied
by, which changes with their age, is a diagonal D, so a step writes one row and nothing else. Their inner products are
kept too, as `gram` K [r, r], of which a step computes one row. With c the products of the columns with m,
all else is r × r:

    D K D = U S² Uᵀ        Qᵀm = S⁻¹ Uᵀ D c        step = Σ_k w_k column_k,  w = D U S⁻¹ (S + ε)⁻¹ Qᵀm

So a step reads the window twice, for K and c and for the step: 3 r d multiplications and an r × r eigenproblem. Sums
over coordinates are in float64 whatever the window's type. S² comes from K, and with sums in float32 all S below a
thousandth of the largest would be noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from blockadapt.errors import NonFiniteGradientError
from blockadapt.moments import statistics_dtype
from blockadapt.validation import (
    Described,
    refusal,
    require,
    require_beta,
    require_choice,
    require_integer,
    require_lr,
    require_number,
)

COMPLEMENTS = ("drop", "scale")
SCOPES = ("model", "tensor")
MOMENTA = ("average", "sum")
COLUMNS = ("gradient", "momentum")

CHUNK = 2048
"""Coordinates that are taken to float64 at a time: 50 rows of them fit a cache of 1 MB."""

Group = dict[str, Any]
State = dict[str, Tensor]


class GGT(Optimizer):
    """Runs full-matrix adaptation in the span of the last r gradients.

        G = [gₜ, β₂ gₜ₋₁, β₂² gₜ₋₂, …]        the last r columns
        GᵀG = U S² Uᵀ,  Q = G U S⁻¹
        m ← β₁ m + (1 − β₁) g
        x ← x − α [Q (S + ε)⁻¹ Qᵀ m + (m − Q Qᵀ m)/ε]

    Published versions disagree; the options say how. It keeps r + 1 numbers a coordinate.

    Args:
        params: Parameters, named parameters or param groups.
        lr: α.
        beta1: β₁.
        beta2: β₂, in (0, 1].
        eps: ε.
        weight_decay: L2 penalty, added to the gradient.
        window: r. Its authors recommend 200.
        complement: The part of m outside the span: "scale" divides it by ε as above, which with a small ε outweighs all
            else; "drop" leaves it out, as the PyTorch version does.
        scope: "model" has one G over all parameters of a param group, "tensor" one for each, as the PyTorch version
            does. Under "model" a parameter without a gradient counts with a zero gradient and is not moved.
        momentum: "average" as above, or "sum": m ← β₁ m + g, as the PyTorch version does.
        columns: "gradient" as above, or "momentum": m in place of g, all columns divided by √min(t, r), as the
            TensorFlow version does.
        relative_cutoff: Eigenvalues of GᵀG below this share of the largest count as zero, and their directions as
            outside the span.
        absolute_cutoff: The same for eigenvalues below this number; the PyTorch version has 1e-4.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 1.0,
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        *,
        window: int = 200,
        complement: str = "drop",
        scope: str = "model",
        momentum: str = "average",
        columns: str = "gradient",
        relative_cutoff: float = 1e-10,
        absolute_cutoff: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
            "window": window,
            "complement": complement,
            "scope": scope,
            "momentum": momentum,
            "columns": columns,
            "relative_cutoff": relative_cutoff,
            "absolute_cutoff": absolute_cutoff,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. If it raises, parameters and state are as before.

        Args:
            closure: Reevaluates the model, calls backward and returns the loss.

        Returns:
            The loss, if there is a closure.

        Raises:
            NonFiniteGradientError: A gradient is not finite, or too large for its square.
            ValueError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            _require_gradients(group, index)
        updates = [self._update(group, params) for group in self.param_groups for params in _units(group)]
        for update in updates:
            update.apply_(self.state)
        return loss

    def _update(self, group: Group, params: Sequence[Tensor]) -> _Update:
        """Compute the step of parameters that share one G, and change nothing.

        Raises:
            NonFiniteGradientError: The step would not be finite.
        """
        states = [self._state(group, param, is_owner=param is params[0]) for param in params]
        step = int(states[0]["step"]) + 1
        row, filled = (step - 1) % group["window"], min(step, group["window"])
        moves = [_Move.of(group, *pair) for pair in zip(params, states, strict=True)]
        products = torch.stack([move.products(filled) for move in moves]).sum(dim=0)
        products[row] = torch.stack([move.own_products() for move in moves]).sum(dim=0)
        if not products.isfinite().all():
            raise NonFiniteGradientError(
                "GGT: the gradient is too large to square; parameters and state are unchanged."
            )
        gram = states[0]["gram"].clone()
        gram[row, :filled] = gram[:filled, row] = products[:, 0]
        ages = (row - torch.arange(filled, dtype=torch.float64, device=gram.device)) % group["window"]
        scales = group["beta2"] ** ages
        if group["columns"] == "momentum":
            scales /= math.sqrt(filled)
        weights = _weights(group, gram[:filled, :filled], products[:, 1], scales)
        keep = 1 / group["eps"] if group["complement"] == "scale" else 0.0
        directions = [move.direction(weights, row, keep) for move in moves]
        return _Update(moves, directions, float(group["lr"]), row, gram)

    def _state(self, group: Group, param: Tensor, is_owner: bool) -> State:
        """Return a parameter's state, a new one at its first step. What several share is with the first of them."""
        if param in self.state:
            state: State = self.state[param]
            return state
        dtypes = {"step": torch.int64, "gram": torch.float64}
        return {
            name: torch.zeros(
                shape,
                dtype=dtypes.get(name, statistics_dtype(param)),
                device="cpu" if name == "step" else param.device,
            )
            for name, shape in _shapes(group, param, is_owner).items()
        }

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; its options are checked before anything is kept."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            _require_options(self.param_groups[-1])
        except Exception:
            del self.param_groups[before:]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, or raise ValueError with the reason and change nothing. Statistics keep their precision."""
        _require_fit(self, state_dict)
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    # torch has cast it to the parameter's dtype
                    device = "cpu" if name == "step" else param.device
                    self.state[param][name] = value.detach().to(device=device, copy=True)


@dataclass(frozen=True)
class _Move:
    """Is one parameter's part of a step: its new column of G and its new m, both flat."""

    param: Tensor
    state: State
    column: Tensor
    m: Tensor

    @classmethod
    def of(cls, group: Group, param: Tensor, state: State) -> _Move:
        """Return the part of a parameter with this state, of which nothing is changed."""
        m, beta1 = state["exp_avg"], group["beta1"]
        g = torch.zeros_like(m) if param.grad is None else param.grad.to(m.dtype)
        if param.grad is not None and group["weight_decay"]:
            g = g + group["weight_decay"] * param.to(m.dtype)
        m = beta1 * m + (1 - beta1 if group["momentum"] == "average" else 1.0) * g
        return cls(param, state, (m if group["columns"] == "momentum" else g).reshape(-1), m.reshape(-1))

    def products(self, filled: int) -> Tensor:
        """Multiply each row of the window with the new column and with m, [filled, 2]."""
        found = torch.zeros(2, filled, dtype=torch.float64, device=self.m.device)
        for at, rows in _chunks(self.state["window"][:filled]):
            found[0].addmv_(rows, self.column[at].double())
            found[1].addmv_(rows, self.m[at].double())
        return found.T

    def own_products(self) -> Tensor:
        """Multiply the new column with itself and with m, [2]."""
        column = self.column.double()
        return torch.stack([column.dot(column), column.dot(self.m.double())])

    def direction(self, weights: Tensor, row: int, keep: float) -> Tensor:
        """Compute keep · m + Σ_k weights_k column_k, of which column `row` is the new one."""
        old = weights.clone()
        old[row] = 0
        direction = torch.empty_like(self.m)
        for at, rows in _chunks(self.state["window"][: len(weights)]):
            sums = torch.mv(rows.T, old).add_(self.column[at].double(), alpha=float(weights[row]))
            direction[at] = sums.add_(self.m[at].double(), alpha=keep)
        return direction


@dataclass(frozen=True)
class _Update:
    """Is a step of parameters that share one G, computed and not yet taken."""

    moves: Sequence[_Move]
    directions: Sequence[Tensor]
    lr: float
    row: int
    gram: Tensor

    def apply_(self, states: dict[Tensor, State]) -> None:
        """Take the step."""
        for move, direction in zip(self.moves, self.directions, strict=True):
            states[move.param] = move.state
            move.state["window"][self.row] = move.column
            move.state["exp_avg"].copy_(move.m.view_as(move.param))
            if move.param.grad is not None:
                move.param.sub_(direction.view_as(move.param), alpha=self.lr)
        owner = self.moves[0].state
        owner["gram"].copy_(self.gram)
        owner["step"] += 1


def _weights(group: Group, gram: Tensor, moment: Tensor, scales: Tensor) -> Tensor:
    """Compute w [r], what each unscaled column is multiplied by in the step, from K, c and the diagonal of D."""
    eigenvalues, U = torch.linalg.eigh(scales[:, None] * gram * scales)
    smallest = torch.finfo(torch.float64).tiny  # a root of less is not accurate
    kept = eigenvalues >= max(group["relative_cutoff"] * float(eigenvalues[-1]), group["absolute_cutoff"], smallest)
    S, U = eigenvalues[kept].sqrt(), U[:, kept]
    projection = U.T @ (scales * moment) / S  # Qᵀm
    if group["complement"] == "scale":
        shares = -projection / (S + group["eps"]) / group["eps"]  # S⁻¹ [(S + ε)⁻¹ − ε⁻¹] Qᵀm: m/ε is added whole
    else:
        shares = projection / (S + group["eps"]) / S
    weights: Tensor = scales * (U @ shares)
    return weights


def _chunks(window: Tensor) -> Iterable[tuple[slice, Tensor]]:
    """Yield the window's columns in float64, some at a time, and where they are. Each is overwritten by the next."""
    rows, coordinates = window.shape
    scratch = torch.empty(rows, min(CHUNK, coordinates), dtype=torch.float64, device=window.device)
    for start in range(0, coordinates, CHUNK):
        at = slice(start, min(start + CHUNK, coordinates))
        yield at, scratch[:, : at.stop - start].copy_(window[:, at])


def _units(group: Group) -> list[list[Tensor]]:
    """Return the parameters of a group, by the G that they share; those that have a gradient."""
    active = [param for param in group["params"] if param.grad is not None]
    if group["scope"] == "tensor":
        return [[param] for param in active]
    return [group["params"]] if active else []


def _require_options(group: Group) -> None:
    owner = "GGT"
    require_lr(owner, group["lr"])
    require_beta(owner, "beta1", group["beta1"])
    require_number(owner, "beta2", group["beta2"], above=0, most=1)
    require_number(owner, "eps", group["eps"], above=0)
    require_number(owner, "weight_decay", group["weight_decay"], least=0)
    require_integer(owner, "window", group["window"], least=1)
    require_choice(owner, "complement", group["complement"], COMPLEMENTS)
    require_choice(owner, "scope", group["scope"], SCOPES)
    require_choice(owner, "momentum", group["momentum"], MOMENTA)
    require_choice(owner, "columns", group["columns"], COLUMNS)
    require_number(owner, "relative_cutoff", group["relative_cutoff"], least=0, below=1)
    require_number(owner, "absolute_cutoff", group["absolute_cutoff"], least=0)
    for param in group["params"]:
        require(param.is_floating_point(), owner, "params", "real floating-point tensors", param.dtype)
        require(param.layout == torch.strided, owner, "params", "dense tensors", param.layout)
    devices = sorted({str(param.device) for param in group["params"]})
    one = group["scope"] == "tensor" or len(devices) <= 1
    require(one, owner, "params", 'on one device under scope "model"', devices)


def _require_gradients(group: Group, index: int) -> None:
    """Raise at a gradient that cannot be used.

    Raises:
        ValueError: A gradient is sparse or complex.
        NonFiniteGradientError: A gradient is not finite.
    """
    for position, param in enumerate(group["params"]):
        if param.grad is None:
            continue
        known = "param_names" in group
        name = repr(group["param_names"][position]) if known else f"parameter {position} of group {index}"
        if param.grad.layout != torch.strided:
            raise ValueError(refusal("GGT", "grad", f"dense (for {name})", param.grad.layout))
        if bad := param.numel() - int(param.grad.isfinite().sum()):
            raise NonFiniteGradientError(
                f"GGT: the gradient of {name} has {bad} of {param.numel()} entries that are not finite; parameters and "
                f"state are unchanged."
            )


def _shapes(group: Group, param: Tensor, is_owner: bool) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a parameter's state."""
    rows = group["window"]
    shapes = {"window": (rows, param.numel()), "exp_avg": tuple(param.shape)}
    return {**shapes, "step": (), "gram": (rows, rows)} if is_owner else shapes


def _require_fit(optimizer: GGT, state_dict: dict[str, Any]) -> None:
    """Raise unless the state has the optimizer's groups and, for each parameter, what the saved options ask for."""
    owner, groups = "GGT.load_state_dict", optimizer.param_groups
    rule = "an optimizer's, with 'state' and 'param_groups'"
    require({"state", "param_groups"} <= {*state_dict}, owner, "state_dict", rule, sorted(map(str, state_dict)))
    counts, saved_counts = ([len(group["params"]) for group in each] for each in (groups, state_dict["param_groups"]))
    rule = f"one with groups of {counts} parameters"
    require(counts == saved_counts, owner, "state_dict", rule, Described(f"groups of {saved_counts}"))
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        missing = [name for name in optimizer.defaults if name not in saved]
        require(not missing, owner, "state_dict", "one of GGT", Described(f"a group without {missing}"))
        _require_options({**saved, "params": group["params"]})
        _require_states(owner, saved, group["params"], state_dict["state"])


def _require_states(owner: str, saved: Group, params: Sequence[Tensor], states: dict[int, State]) -> None:
    shared = saved["scope"] == "model"
    present = [key in states for key in saved["params"]]
    rule = "there for all parameters of a group or none"
    require(not shared or len({*present}) <= 1, owner, "state", rule, Described(f"{sum(present)} of {len(present)}"))
    for position, (param, key) in enumerate(zip(params, saved["params"], strict=True)):
        if key in states:
            shapes = _shapes(saved, param, is_owner=position == 0 or not shared)
            found = {name: tuple(value.shape) for name, value in states[key].items()}
            require(found == shapes, owner, f"state[{key}]", f"of shapes {shapes}", Described(str(found)))
