"""GGT against a dense oracle, its special cases, its cost counted, its resumption, and what it refuses."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from blockadapt import BlockAdagrad
from blockadapt.errors import NonFiniteGradientError
from blockadapt_experiments.contenders.ggt import COLUMNS, COMPLEMENTS, GGT, MOMENTA, SCOPES
from support.contract_cases import Net, bits, everything, give_gradients_, grad_bits, param_bits, twins
from support.files import through_a_file

Array = NDArray[np.float64]

SHAPES = [(3, 4), (5,), (), (2, 3, 2)]
"""30 coordinates."""


class DenseGGT:
    """The rule as printed, in NumPy: a list of columns, one d × d matrix and its eigenvectors."""

    def __init__(
        self,
        x: Array,
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 1.0,
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        window: int = 200,
        complement: str = "drop",
        momentum: str = "average",
        columns: str = "gradient",
        relative_cutoff: float = 1e-10,
        absolute_cutoff: float = 0.0,
    ) -> None:
        self.x, self.m = np.array(x, dtype=np.float64), np.zeros_like(x)
        self.lr, self.beta1, self.beta2, self.eps, self.weight_decay = lr, beta1, beta2, eps, weight_decay
        self.window, self.complement, self.momentum, self.columns = window, complement, momentum, columns
        self.cutoffs = relative_cutoff, absolute_cutoff
        self.newest_first: list[Array] = []

    def step(self, grad: Array) -> None:
        g = grad + self.weight_decay * self.x
        self.m = self.beta1 * self.m + ((1 - self.beta1) * g if self.momentum == "average" else g)
        column = self.m if self.columns == "momentum" else g
        self.newest_first = [column, *self.newest_first][: self.window]
        scale = len(self.newest_first) ** -0.5 if self.columns == "momentum" else 1.0
        G = scale * np.stack([self.beta2**age * column for age, column in enumerate(self.newest_first)], axis=1)
        eigenvalues, vectors = np.linalg.eigh(G @ G.T)
        relative, absolute = self.cutoffs
        kept = (eigenvalues >= max(relative * eigenvalues[-1], absolute)) & (eigenvalues > 0)
        Q, S = vectors[:, kept], np.sqrt(eigenvalues[kept])
        step = Q @ np.diag(1 / (S + self.eps)) @ Q.T @ self.m
        if self.complement == "scale":
            step = step + (self.m - Q @ Q.T @ self.m) / self.eps
        self.x = self.x - self.lr * step


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def give(params: list[nn.Parameter], grad: Array) -> None:
    """Set the gradients to the pieces of one flat vector."""
    pieces = torch.from_numpy(grad).split([p.numel() for p in params])
    for param, piece in zip(params, pieces, strict=True):
        param.grad = piece.reshape(param.shape).to(param.dtype)


def flat(params: list[nn.Parameter]) -> Array:
    values: Array = torch.cat([p.detach().double().reshape(-1) for p in params]).numpy()
    return values


def gradients(steps: int, size: int = 30, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(steps, size))


def apart(array: Array) -> list[Array]:
    """A flat vector over all parameters as one for each."""
    return np.split(array, np.cumsum([math.prod(shape) for shape in SHAPES])[:-1])


# The rule ----------------------------------------------------------------------------------------------------------

OPTIONS = ("complement", "scope", "momentum", "columns", "beta2")
TURNS = 4
"""A window that fills and turns; those that never do are crossed with both scopes among the slow tests."""


def combinations() -> Iterator[Any]:
    for *values, window in itertools.product(COMPLEMENTS, SCOPES, MOMENTA, COLUMNS, (1.0, 0.8), (1, TURNS, 50)):
        options = dict(zip(OPTIONS, values, strict=True))
        marks = [pytest.mark.slow] if window != TURNS and options["scope"] != SCOPES[0] else []
        yield pytest.param(options, window, marks=marks, id="-".join(map(str, (*values, window))))


@pytest.mark.parametrize(("options", "window"), [*combinations()])
def test_every_option_follows_the_dense_rule_while_the_window_fills_and_turns(
    options: dict[str, Any], window: int
) -> None:
    params = parameters()
    shared: dict[str, Any] = {"lr": 0.05, "eps": 0.01, "weight_decay": 0.1, "window": window}
    optimizer = GGT(params, **shared, **options)
    dense = {name: value for name, value in options.items() if name != "scope"}
    together = options["scope"] == "model"
    oracles = [DenseGGT(x, **shared, **dense) for x in ([flat(params)] if together else apart(flat(params)))]
    for grad in gradients(11):
        give(params, grad)
        optimizer.step()
        for oracle, piece in zip(oracles, [grad] if together else apart(grad), strict=True):
            oracle.step(piece)
        expected = np.concatenate([oracle.x for oracle in oracles])
        np.testing.assert_allclose(flat(params), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("complement", COMPLEMENTS)
def test_a_window_longer_than_the_dimension_has_no_more_directions_than_that(complement: str) -> None:
    param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    options: dict[str, Any] = {"lr": 0.1, "window": 20, "complement": complement, "eps": 1e-3}
    optimizer, oracle = GGT([param], **options), DenseGGT(np.zeros(4), **options)
    for grad in gradients(30, size=4):
        give([param], grad)
        optimizer.step()
        oracle.step(grad)
        np.testing.assert_allclose(flat([param]), oracle.x, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("cutoff", [{"relative_cutoff": 0.3}, {"absolute_cutoff": 25.0}])
@pytest.mark.parametrize("complement", COMPLEMENTS)
def test_eigenvalues_below_a_cutoff_count_as_zero(cutoff: dict[str, float], complement: str) -> None:
    params = parameters()
    options: dict[str, Any] = {"lr": 0.05, "eps": 0.1, "window": 5, "complement": complement}
    optimizer, oracle = GGT(params, **options, **cutoff), DenseGGT(flat(params), **options, **cutoff)
    uncut = DenseGGT(flat(params), **options)
    for grad in gradients(8):
        give(params, grad)
        optimizer.step()
        oracle.step(grad)
        uncut.step(grad)
    np.testing.assert_allclose(flat(params), oracle.x, rtol=1e-9, atol=1e-9)
    assert np.abs(oracle.x - uncut.x).max() > 1e-3


def test_whole_history_without_momentum_is_full_matrix_adagrad() -> None:
    """The library's averaged form has δ√t for δ: with δ = ε/√t the two agree."""
    ours, theirs = parameters(), parameters()
    ggt = GGT(ours, lr=0.1, beta1=0.0, eps=0.05, window=20, complement="scale")
    adagrad = BlockAdagrad(theirs, lr=0.1, grouping="joint")
    for t, grad in enumerate(gradients(12), start=1):
        give(ours, grad)
        give(theirs, grad)
        adagrad.param_groups[0]["eps"] = 0.05 / math.sqrt(t)
        ggt.step()
        adagrad.step()
        np.testing.assert_allclose(flat(ours), flat(theirs), rtol=1e-9, atol=1e-9)


def test_a_window_of_one_without_momentum_is_normalised_descent() -> None:
    params = parameters()
    optimizer = GGT(params, lr=0.1, beta1=0.0, eps=0.5, window=1)
    x = flat(params)
    for grad in gradients(4):
        give(params, grad)
        optimizer.step()
        x = x - 0.1 * grad / (np.linalg.norm(grad) + 0.5)
        np.testing.assert_allclose(flat(params), x, rtol=1e-12, atol=1e-12)


def test_a_rotation_of_the_coordinates_rotates_the_path() -> None:
    R = np.linalg.qr(gradients(9, size=9, seed=5))[0]
    plain, turned = (nn.Parameter(torch.zeros(9, dtype=torch.float64)) for _ in range(2))
    optimizers = [GGT([param], lr=0.1, window=3, beta2=0.9, complement="scale", eps=0.01) for param in (plain, turned)]
    for grad in gradients(7, size=9):
        give([plain], grad)
        give([turned], R @ grad)
        for optimizer in optimizers:
            optimizer.step()
    np.testing.assert_allclose(flat([turned]), R @ flat([plain]), rtol=1e-9, atol=1e-9)


def test_how_parameters_are_cut_does_not_matter_under_scope_model() -> None:
    params, whole = parameters(), nn.Parameter(torch.from_numpy(flat(parameters())))
    optimizers = [GGT(each, lr=0.1, window=4, eps=0.01) for each in (params, [whole])]
    for grad in gradients(7):
        give(params, grad)
        give([whole], grad)
        for optimizer in optimizers:
            optimizer.step()
    np.testing.assert_allclose(flat(params), flat([whole]), rtol=1e-12, atol=1e-12)


# Precision ---------------------------------------------------------------------------------------------------------


def test_float32_follows_float64_where_singular_values_span_four_orders() -> None:
    """In float32, sums would leave S below a thousandth of the largest to noise."""
    params, steps = parameters(torch.float32), gradients(8)
    steps[:4] *= 1e4
    options: dict[str, Any] = {"lr": 1e-3, "window": 8, "eps": 1e-4}
    optimizer, oracle = GGT(params, **options), DenseGGT(flat(params), **options)
    for grad in steps:
        give(params, grad)
        before = flat(params)
        optimizer.step()
        oracle.step(np.float32(grad).astype(np.float64))
        moved, expected = flat(params) - before, oracle.x - before
        np.testing.assert_allclose(moved, expected, atol=3e-6 * np.abs(before).max())
        oracle.x = flat(params)


@pytest.mark.parametrize("magnitude", [1e-40, 1e-20, 1e15, 1e30])
@pytest.mark.parametrize("complement", COMPLEMENTS)
def test_tiny_and_huge_gradients_give_the_step_of_their_ratio_to_eps(magnitude: float, complement: str) -> None:
    """With ε in proportion to g, a step does not depend on the unit of g, under "drop", or on its inverse."""
    results = []
    for unit in (1.0, magnitude):
        params = parameters(torch.float64)
        optimizer = GGT(params, lr=0.1, window=3, eps=1e-2 * unit, complement=complement)
        for grad in gradients(5):
            give(params, unit * grad)
            optimizer.step()
        results.append(flat(params))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9, atol=1e-9)


def test_the_kept_gram_matrix_is_that_of_the_window() -> None:
    params = parameters(torch.float32)
    optimizer = GGT(params, window=4)
    for grad in gradients(23):
        give(params, grad)
        optimizer.step()
    columns = torch.cat([optimizer.state[param]["window"].double() for param in params], dim=1)
    gram = optimizer.state[params[0]]["gram"]
    torch.testing.assert_close(gram, columns @ columns.T, rtol=1e-14, atol=1e-14)
    assert torch.equal(gram, gram.T)


# Zero and missing gradients ----------------------------------------------------------------------------------------


def test_zero_gradients_move_nothing_and_stay_finite() -> None:
    for complement in COMPLEMENTS:
        params = parameters()
        optimizer, before = GGT(params, window=3, complement=complement), flat(params)
        for _ in range(5):
            give(params, np.zeros(30))
            optimizer.step()
        np.testing.assert_array_equal(flat(params), before)


@pytest.mark.parametrize("complement", COMPLEMENTS)
def test_gradients_that_vanish_or_repeat_follow_the_dense_rule(complement: str) -> None:
    params = parameters()
    options: dict[str, Any] = {"lr": 0.1, "window": 4, "eps": 0.01, "complement": complement}
    optimizer, oracle = GGT(params, **options), DenseGGT(flat(params), **options)
    first, second = gradients(2)
    for grad in (first, first, first, second, 0 * first, 0 * first, 0 * first, 0 * first, second, -second):
        give(params, grad)
        optimizer.step()
        oracle.step(grad)
        np.testing.assert_allclose(flat(params), oracle.x, rtol=1e-8, atol=1e-8)


def test_a_parameter_without_a_gradient_is_not_moved_and_counts_with_zero() -> None:
    params, others = parameters(), parameters()
    optimizer, reference = (GGT(each, lr=0.1, window=3, weight_decay=0.0) for each in (params, others))
    for t, grad in enumerate(gradients(6)):
        give(params, grad)
        give(others, grad)
        if t == 3:
            params[1].grad = None
            assert others[1].grad is not None
            others[1].grad.zero_()
        kept = params[1].detach().clone()
        optimizer.step()
        reference.step()
        if t == 3:
            assert torch.equal(params[1], kept)
            with torch.no_grad():
                params[1].copy_(others[1])
        assert param_bits(params) == param_bits(others)


def test_a_frozen_parameter_is_left_alone_and_leaves_the_others_alone() -> None:
    """Weight decay, too: it is no part of a gradient that is not there."""
    params, others = parameters(), parameters()
    frozen = params[2].requires_grad_(False).detach().clone()
    optimizer = GGT(params, window=3, weight_decay=0.5)
    reference = GGT([param for position, param in enumerate(others) if position != 2], window=3, weight_decay=0.5)
    for grad in gradients(4):
        give(params, grad)
        give(others, grad)
        params[2].grad = None
        optimizer.step()
        reference.step()
    assert torch.equal(params[2], frozen)
    np.testing.assert_allclose(flat(params), flat([*others[:2], params[2], others[3]]), rtol=1e-14)


def test_nothing_happens_without_any_gradient() -> None:
    for scope in SCOPES:
        optimizer = GGT(parameters(), scope=scope)
        before = everything(optimizer)
        optimizer.step()
        assert everything(optimizer) == before


# Cost, counted -----------------------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """Counts the entries of matrices that are multiplied with a vector, and the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = 0
        self.largest = 0
        self.eigenproblems: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("mv", "addmv_"):
            self.multiplications += args[name == "addmv_"].numel()
        if name in ("mm", "bmm", "addmm", "addmm_"):
            self.multiplications += args[0].numel() * args[1].shape[-1]
        if name == "_linalg_eigh":
            self.eigenproblems.append(tuple(args[0].shape))
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not function.is_view:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("scope", SCOPES)
def test_a_step_costs_three_products_with_the_window_and_one_small_eigenproblem(scope: str) -> None:
    r, shapes = 20, [(300, 50), (1000,)]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    d = sum(p.numel() for p in params)
    optimizer = GGT(params, window=r, scope=scope)
    for _ in range(r + 1):
        give(params, np.random.default_rng(0).normal(size=d))
        optimizer.step()
    with Counter() as counter:
        optimizer.step()
    problems = 1 if scope == "model" else len(params)
    assert counter.eigenproblems == [(r, r)] * problems
    assert counter.multiplications <= 3 * r * d + 3 * r * r * problems
    assert counter.largest <= max(params[0].numel(), r * 2048)


@pytest.mark.parametrize("scope", SCOPES)
def test_state_is_the_window_and_the_momentum_and_a_gram_matrix(scope: str) -> None:
    r, params = 6, parameters(torch.float32)
    optimizer = GGT(params, window=r, scope=scope)
    give(params, gradients(1)[0])
    optimizer.step()
    owners = 1 if scope == "model" else len(params)
    numbers = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    assert numbers == (r + 1) * 30 + owners * (r * r + 1)


# Resumption --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_resumed_run_is_the_uninterrupted_one(dtype: torch.dtype, scope: str) -> None:
    """Saved before the first step, before the window of 4 is full, when it just is, and after it has turned."""
    options: dict[str, Any] = {"lr": 0.01, "window": 4, "beta2": 0.9, "scope": scope, "weight_decay": 0.1}
    (model,) = twins(dtype=dtype, count=1)
    whole = GGT(model.parameters(), **options)
    states: dict[int, dict[str, Any]] = {}
    for step in range(10):
        if step in (0, 2, 4, 7):
            states[step] = through_a_file({"model": model.state_dict(), "optimizer": whole.state_dict()})
        give_gradients_(model.parameters(), step)
        whole.step()
    for saved_at, state in states.items():
        (other,) = twins(dtype=dtype, count=1)
        other.load_state_dict(state["model"])
        resumed = GGT(other.parameters(), lr=5.0)  # options come from the state
        resumed.load_state_dict(state["optimizer"])
        for step in range(saved_at, 10):
            give_gradients_(other.parameters(), step)
            resumed.step()
        assert everything(resumed) == everything(whole), f"saved at {saved_at}"


def test_a_loaded_state_shares_no_memory_with_its_source() -> None:
    model, other = twins()
    source, target = GGT(model.parameters(), window=2), GGT(other.parameters(), window=2)
    give_gradients_(model.parameters(), 0)
    source.step()
    target.load_state_dict(source.state_dict())
    before = everything(source)
    give_gradients_(other.parameters(), 1)
    target.step()
    assert everything(source) == before


# Refusals ----------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any, str]] = [
    ("lr", -1.0, "a finite number >= 0"),
    ("beta1", 1.0, "in [0, 1)"),
    ("beta2", 0.0, "in (0, 1]"),
    ("beta2", 1.1, "in (0, 1]"),
    ("eps", 0.0, "a finite number > 0"),
    ("weight_decay", -0.1, "a finite number >= 0"),
    ("window", 0, "an integer >= 1"),
    ("window", 2.0, "an integer >= 1"),
    ("complement", "keep", "one of 'drop', 'scale'"),
    ("scope", "layer", "one of 'model', 'tensor'"),
    ("momentum", "ema", "one of 'average', 'sum'"),
    ("columns", "m", "one of 'gradient', 'momentum'"),
    ("relative_cutoff", 1.0, "in [0, 1)"),
    ("absolute_cutoff", math.nan, "a finite number >= 0"),
]


@pytest.mark.parametrize(("argument", "value", "rule"), BAD)
def test_a_bad_option_is_refused_in_one_sentence(argument: str, value: Any, rule: str) -> None:
    sentence = f"GGT: `{argument}` must be {rule}, got {value!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        GGT(parameters(), **{argument: value})
    optimizer = GGT(parameters())
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        optimizer.add_param_group({"params": parameters(), argument: value})
    assert len(optimizer.param_groups) == 1


def test_other_parameters_than_real_dense_ones_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^GGT: `params` must be real floating-point tensors, got torch.complex64\.$"):
        GGT([torch.zeros(2, dtype=torch.complex64)])
    with pytest.raises(ValueError, match=r'^GGT: `params` must be on one device under scope "model", got \['):
        GGT([torch.zeros(2), torch.zeros(2, device="meta")])
    GGT([torch.zeros(2), torch.zeros(2, device="meta")], scope="tensor")


def trained() -> tuple[Net, GGT]:
    (model,) = twins(count=1)
    optimizer = GGT(model.named_parameters(), window=3)
    for step in range(2):
        give_gradients_(model.parameters(), step)
        optimizer.step()
    give_gradients_(model.parameters(), 2)
    return model, optimizer


def spoil_with(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(grad: Tensor) -> Tensor:
        grad[0] = value
        return grad

    return spoil


NOT_FINITE = (
    "GGT: the gradient of 'norm.bias' has 1 of 5 entries that are not finite; parameters and state are unchanged."
)
NOT_DENSE = "GGT: `grad` must be dense (for 'norm.bias'), got torch.sparse_coo."


@pytest.mark.parametrize(
    ("spoil", "error", "sentence"),
    [
        pytest.param(spoil_with(math.nan), NonFiniteGradientError, NOT_FINITE, id="nan"),
        pytest.param(spoil_with(-math.inf), NonFiniteGradientError, NOT_FINITE, id="infinite"),
        pytest.param(Tensor.to_sparse, ValueError, NOT_DENSE, id="sparse"),
    ],
)
def test_a_step_that_is_refused_changes_nothing(
    spoil: Callable[[Tensor], Tensor], error: type[Exception], sentence: str
) -> None:
    model, optimizer = trained()
    assert model.norm.bias.grad is not None
    model.norm.bias.grad = spoil(model.norm.bias.grad)
    before = everything(optimizer)
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        optimizer.step()
    assert everything(optimizer) == before


@pytest.mark.parametrize("scope", SCOPES)
def test_a_gradient_too_large_to_square_changes_nothing(scope: str) -> None:
    params = parameters()
    optimizer = GGT(params, window=3, scope=scope)
    before = everything(optimizer)
    grad = gradients(1)[0]
    grad[-1] = 1e200  # in the last parameter, when the others' steps are computed
    give(params, grad)
    with pytest.raises(NonFiniteGradientError, match=r"^GGT: the gradient is too large to square; "):
        optimizer.step()
    assert everything(optimizer) == before


def without_parameter(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def without_option(state: dict[str, Any]) -> None:
    del state["param_groups"][0]["window"]


def with_another_window(state: dict[str, Any]) -> None:
    state["param_groups"][0]["window"] = 4


def without_one_state(state: dict[str, Any]) -> None:
    del state["state"][2]


def without_state(state: dict[str, Any]) -> None:
    del state["state"]


BAD_STATES: dict[Callable[[dict[str, Any]], None], str] = {
    without_parameter: "`state_dict` must be one with groups of [7] parameters, got groups of [6].",
    without_option: "`state_dict` must be one of GGT, got a group without ['window'].",
    with_another_window: "`state[0]` must be of shapes {'window': (4, 1), 'exp_avg': (), ",
    without_one_state: "`state` must be there for all parameters of a group or none, got 6 of 7.",
    without_state: "`state_dict` must be an optimizer's, with 'state' and 'param_groups', got ['param_groups'].",
}


@pytest.mark.parametrize(("spoil", "sentence"), list(BAD_STATES.items()))
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    spoil: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    _, optimizer = trained()
    state = through_a_file(optimizer.state_dict())
    spoil(state)
    before = everything(optimizer)
    with pytest.raises(ValueError, match="^" + re.escape(f"GGT.load_state_dict: {sentence}")):
        optimizer.load_state_dict(state)
    assert everything(optimizer) == before


# As an optimizer ---------------------------------------------------------------------------------------------------


def test_gradients_are_left_as_they_are() -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["weight_decay"] = 0.3
    before = grad_bits(list(model.parameters()))
    optimizer.step()
    assert grad_bits(list(model.parameters())) == before


def test_a_closure_runs_with_grad_enabled_and_its_loss_is_returned() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = GGT([param], lr=0.5, beta1=0.0, eps=1e-8, window=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 0.5 / math.sqrt(3)))


def test_param_groups_have_their_own_options_and_their_own_window() -> None:
    first, second = parameters(), parameters()
    both = GGT([{"params": first, "window": 2}, {"params": second, "lr": 0.5, "complement": "scale"}], lr=0.1)
    alone = parameters(), parameters()
    apart = GGT(alone[0], lr=0.1, window=2), GGT(alone[1], lr=0.5, complement="scale")
    for grad in gradients(4):
        for params in (first, second, *alone):
            give(params, grad)
        both.step()
        for optimizer in apart:
            optimizer.step()
    assert param_bits([*first, *second]) == param_bits([*alone[0], *alone[1]])


def test_memory_formats_do_not_matter() -> None:
    results = []
    for channels_last in (False, True):
        layer = nn.Conv2d(3, 4, 2)
        with torch.no_grad():
            for param in layer.parameters():
                param.fill_(0.5)
        if channels_last:
            layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = GGT(layer.parameters(), window=2)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for param in layer.parameters():
                grad = torch.randn(param.shape, generator=generator)
                param.grad = torch.empty_like(param).copy_(grad)
            optimizer.step()
        results.append([bits(param) for param in layer.parameters()])
    assert results[0] == results[1]
